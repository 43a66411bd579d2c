# SPDX-License-Identifier: Apache-2.0
"""Log lines of a server: one JSON object each, never with a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from hillinfer.errors import Failure

_MOST_DETAIL = 8000


class Log:
    """Writes lines.

    Parameters
    ----------
    write
        Takes each line without its end; standard error where None.
    """

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _to(sys.stderr)

    def line(self, event: str, facts: Mapping[str, object], level: str = "info") -> None:
        """Write what happened; facts that are None are left out."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        told = {name: value for name, value in facts.items() if value is not None}
        # A log that takes no more costs no answer.
        with suppress(OSError, ValueError):
            self._write(json.dumps({"time": now, "level": level, "event": event, **told}))

    def failure(self, event: str, error: BaseException, facts: Mapping[str, object]) -> None:
        """Write what failed; where it was not foreseen, its kind and where it came from."""
        failure = Failure.of(error)
        said, detail = failure.message, None
        if failure.detail is not None:
            # Words that are neither ours nor the system's may quote a prompt.
            said = said if isinstance(error, OSError | MemoryError) else type(error).__name__
            detail = "".join(traceback.format_tb(error.__traceback__))[-_MOST_DETAIL:]
        self.line(event, {"error": said, "detail": detail, **facts}, "error")


def _to(stream: TextIO) -> Callable[[str], object]:
    def write(line: str) -> None:
        stream.write(line + "\n")
        stream.flush()

    return write


class LogHandler(logging.Handler):
    """Gives what a library logs to a log.

    Parameters
    ----------
    log
        Takes it.
    """

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        # What libraries say of a request may hold parts of it; of errors the kind is enough.
        kind = record.exc_info[0] if record.exc_info else None
        said = record.getMessage() if kind is None else kind.__name__
        told = {"logger": record.name, "message": said}
        self._log.line("library", told, record.levelname.lower())
