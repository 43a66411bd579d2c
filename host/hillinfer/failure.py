# SPDX-License-Identifier: Apache-2.0
"""What ended a run, in words that say how to go on."""

from __future__ import annotations

import errno
import traceback
from dataclasses import dataclass
from enum import StrEnum

from hillinfer.errors import HillInferError
from hillinfer.option_names import without_python_names

# Variable that lets a defect show its traceback on standard error.
TRACEBACK_VARIABLE = "HILLINFER_TRACEBACK"
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
_NO_THREAD = "can't start new thread"


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """What ended a run before its end.

    Parameters
    ----------
    finish
        INTERRUPTED by a signal, or FAILED.
    message
        What happened and how to go on, in one line.
    detail
        Traceback of what HillInfer did not raise on purpose; None for the rest.
    """

    finish: Finish
    message: str
    detail: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return what an exception means to the user of a run."""
        if isinstance(error, KeyboardInterrupt):
            # A signal's name, or nothing where Python's own handler raised it.
            by = f" ({error})" if str(error) else ""
            return cls(Finish.INTERRUPTED, f"interrupted{by}")
        if isinstance(error, HillInferError):
            return cls(Finish.FAILED, without_python_names(_line(str(error))))
        return cls(Finish.FAILED, _unplanned(error), _traceback(error))


def _unplanned(error: BaseException) -> str:
    """Say what an exception means that HillInfer did not raise itself."""
    said = _line(str(error)) or "no reason given"
    if isinstance(error, MemoryError) or any(one in said.lower() for one in _NO_MEMORY):
        return (
            f"memory ran out ({type(error).__name__}: {said}): free some or raise its limit, "
            "shorten the prompt, or lower --dram-budget"
        )
    if _NO_THREAD in said:
        return (
            "the system starts no more threads: raise the limit of processes (ulimit -u, or the "
            "container's), or lower --threads"
        )
    if isinstance(error, OSError) and error.errno is not None:
        place = "" if error.filename is None else f" ({error.filename})"
        fix = (
            "raise ulimit -n"
            if error.errno in (errno.EMFILE, errno.ENFILE)
            else "check the drive and the limits of this process"
        )
        return f"the system refused: {error.strerror}{place}; {fix}"
    return (
        f"{type(error).__name__}: {said}; this is a defect of HillInfer: run again with "
        f"{TRACEBACK_VARIABLE}=1 to see where, and report it"
    )


def _traceback(error: BaseException) -> str | None:
    try:
        return "".join(traceback.format_exception(error))
    except MemoryError:
        return None


def _line(text: str) -> str:
    return " ".join(text.split())
