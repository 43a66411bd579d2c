# SPDX-License-Identifier: Apache-2.0
"""Writes spans in the trace event format, which trace viewers open."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from hillinfer.errors import HillInferWarning
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.private_file import private_file
from hillinfer.timeline.span import Span

PROCESS_NAME = "hillinfer"
_END = b"\n]\n"
_ORDER = {lane: place for place, lane in enumerate(Lane)}


class TraceFile:
    """A JSON array of trace events, an event on each line.

    Every write ends with the closing bracket, which the next one overwrites, so a process that is
    killed leaves a whole file. Viewers want events of one thread to nest, so each thread has a
    number of its own in each lane. Where the file cannot be written any more, a warning says so
    once and the trace ends: generation goes on. Not for several threads at once.

    Parameters
    ----------
    file
        Where to; replaced, and readable by its owner only.

    Attributes
    ----------
    origin
        What its times count from, in nanoseconds of `time.perf_counter_ns`.

    Raises
    ------
    SettingsError
        Where the file cannot be made.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.origin = time.perf_counter_ns()
        self._process = os.getpid()
        self._threads: dict[tuple[Lane, int], int] = {}
        self._end = 0
        self._out: FileIO | None = private_file(file, "the trace", "--trace")
        self._write(b"[\n" + _line(self._metadata("process_name", 0, {"name": PROCESS_NAME})))

    def append(self, spans: Sequence[Span]) -> None:
        """Write spans; harmless after `close`."""
        if self._out is None or not spans:
            return
        lines = [b""]
        for span in spans:
            key = span.lane, span.thread
            if key not in self._threads:
                number = self._threads[key] = len(self._threads) + 1
                name = f"{span.lane} ({_thread_name(span.thread)})"
                lines.append(_line(self._metadata("thread_name", number, {"name": name})))
                place = _ORDER[span.lane]
                sorted_at = self._metadata("thread_sort_index", number, {"sort_index": place})
                lines.append(_line(sorted_at))
            lines.append(_line(self._complete(span, self._threads[key])))
        self._write(b",\n".join(lines))

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        out, self._out = self._out, None
        if out is not None:
            try:
                out.close()
            except OSError as error:
                self._warn(error)

    def _complete(self, span: Span, thread: int) -> dict[str, Any]:
        return {
            "name": span.name,
            "cat": span.lane.value,
            "ph": "X",
            # Microseconds, with nanoseconds behind the point.
            "ts": (span.start - self.origin) / 1000,
            "dur": (span.stop - span.start) / 1000,
            "pid": self._process,
            "tid": thread,
            "args": {"step": span.step, **span.details},
        }

    def _metadata(self, name: str, thread: int, values: dict[str, str | int]) -> dict[str, Any]:
        return {
            "name": name,
            "ph": "M",
            "ts": 0,
            "pid": self._process,
            "tid": thread,
            "args": values,
        }

    def _write(self, lines: bytes) -> None:
        out = self._out
        assert out is not None
        at = self._end
        left = lines + _END
        try:
            while left:
                written = os.pwrite(out.fileno(), left, at)
                at, left = at + written, left[written:]
            self._end = at - len(_END)
        except OSError as error:
            self._out = None
            # What was whole before becomes whole again; its place is still there.
            with suppress(OSError):
                os.ftruncate(out.fileno(), self._end)
                os.pwrite(out.fileno(), _END, self._end)
            with suppress(OSError):
                out.close()
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        warnings.warn(
            f"the trace {self._file} ends early: {error.strerror}; generation goes on",
            HillInferWarning,
            stacklevel=4,
        )


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


def _thread_name(ident: int) -> str:
    for thread in threading.enumerate():
        if thread.ident == ident:
            return thread.name
    return f"thread {ident}"
