# SPDX-License-Identifier: Apache-2.0
"""Errors that say value, reason and fix, and the one line for whatever else ends a run."""

from __future__ import annotations

import errno
import os
import re
import resource
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

# --- Options by their names in Python ---

# Options that are settings of the same name, but for the hyphens.
_SETTINGS = (
    "alpha", "rule", "scope", "query", "shadow", "kept-sinks", "kept-recent", "max-selected",
    "exact", "exact-floor",
    "dram-budget", "pool-policy", "pool-sizes", "pool-timeline", "trace", "cold-dir",
    "encrypt-cold-pool", "device",
    "beta", "beta-model", "xclbin", "pynq-python", "block-rows", "prefetch-blocks",
    "block-tokens", "io", "io-threads",
)  # fmt: skip
_OTHERS = {
    "dtype": "dtype of from_pretrained",
    "save-session": "cache.save_session",
    "session": "attachment.load_session",
}
_NAMES = {name: name.replace("-", "_") for name in _SETTINGS} | _OTHERS
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)(?![\w-])(?! \([\w.]+ in Python\))")
_IN_PYTHON = re.compile(r" \(in Python: [^()]*\)")


def with_python_names(message: str) -> str:
    """Return a message that names options, and at its end what they are called in Python."""
    bare = without_python_names(message)
    options = dict.fromkeys(_OPTION.findall(bare))
    names = [_NAMES[option] for option in options if option in _NAMES]
    return f"{bare} (in Python: {', '.join(names)})" if names else bare


def without_python_names(message: str) -> str:
    """Return a message as the command shows it, whose users have the options."""
    return _IN_PYTHON.sub("", message)


# --- Errors and warnings ---


class HillInferError(Exception):
    """Base of every error that HillInfer raises on purpose.

    What it advises is written with the command's options; what they are called in Python is added
    where the message is read.
    """

    def __str__(self) -> str:
        return with_python_names(super().__str__())


class SettingsError(HillInferError, ValueError):
    """A setting is outside what it allows."""


class UnsupportedFeatureError(HillInferError):
    """A model or a way of generating that would give wrong answers, refused with the way out."""


class BudgetError(HillInferError):
    """The DRAM budget cannot hold what it must hold."""


class ColdPoolError(HillInferError):
    """The drive or the directory of the cold pool failed or cannot be used."""


class PageLockError(HillInferError):
    """Host memory could not be locked for a GPU; copies then go through pageable memory."""


class CacheUseError(HillInferError):
    """A cache was given something that does not continue what it holds."""


class PromptError(HillInferError):
    """A prompt is missing, unreadable, empty, or too long for the model."""


class ModelError(HillInferError):
    """A model is not where it was said to be, is not a model, or is of an unknown kind."""


class FetchError(HillInferError):
    """A registry model could not be fetched, or is not what it should be."""


class FitError(HillInferError):
    """Weights, activations, DRAM budget or cold pool do not fit this machine."""


class SessionError(HillInferError):
    """A session cannot be saved, or what lies in its directory cannot be trusted or used."""


class BrokenRunError(HillInferError):
    """A run failed in the middle; what it had done until then was shown and reported."""


class HillInferWarning(UserWarning):
    """Something works, but not as well as a user may expect; worded as `HillInferError` is."""

    def __str__(self) -> str:
        return with_python_names(super().__str__())


class DeviceError(HillInferError):
    """A device failed, hung or vanished; what it held must be made again on the host."""


def warn_of_loss(error: DeviceError) -> None:
    """Tell the user that scoring goes on without the device."""
    warnings.warn(
        f"{error}; the host goes on scoring and codes the lost shadow again: same tokens, slower",
        HillInferWarning,
        stacklevel=2,
    )


class SetupWarning(HillInferWarning):
    """Drive and budget allow less than they should; the command says so before it starts."""


# --- Libraries' exceptions as one line ---

_MOST_LETTERS = 300
_NOT_OURS = (KeyboardInterrupt, SystemExit, GeneratorExit, HillInferError)


@contextmanager
def one_line(what: str, fix: str = "") -> Iterator[None]:
    """Turn whatever a library raises in a block into a ModelError that names it.

    Libraries raise anything over hostile files, and panics of those in Rust are no Exception.
    Interrupts and errors of HillInfer's own pass.

    Parameters
    ----------
    what
        What cannot be done, as it goes on after "cannot".
    fix
        What helps.
    """
    try:
        yield
    except _NOT_OURS:
        raise
    except BaseException as error:
        said = " ".join(str(error).split())
        if len(said) > _MOST_LETTERS:
            said = said[:_MOST_LETTERS] + " …"
        raise ModelError(
            f"cannot {what}: {type(error).__name__}: {said}" + (f"; {fix}" if fix else "")
        ) from error


# --- What the operating system refused ---

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What says something about this process and not about the file that was asked for.
SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
_RIGHTS = frozenset({errno.EACCES, errno.EPERM})


def reason_of(error: OSError) -> str:
    """Return why a call failed, which the error itself does not always say."""
    if error.strerror:
        return error.strerror
    if error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def way_out(error: OSError, otherwise: str) -> str:
    """Return what to do about an error.

    Parameters
    ----------
    error
        Of any call.
    otherwise
        What helps where another file or directory does: `choose another --cold-dir`.
    """
    if error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"raise the limit on open files, {limit} now, with ulimit -n {max(4096, 2 * limit)}"
    if error.errno == errno.ENFILE:
        return "the machine has too many open files: end other programs, or raise fs.file-max"
    if error.errno in (errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN):
        return "the machine or this process is out of memory: end other programs, or raise ulimit"
    if error.errno in _RIGHTS:
        return f"take the right to use it, or {otherwise}"
    if error.errno == errno.EROFS:
        return f"it is mounted read-only: mount it for writing, or {otherwise}"
    if error.errno in FULL:
        return f"free space on the drive or {otherwise}"
    if error.errno in (errno.EOPNOTSUPP, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
        return otherwise
    return f"check the drive or {otherwise}"


# --- What ended a run ---

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
