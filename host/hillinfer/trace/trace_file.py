# SPDX-License-Identifier: Apache-2.0
"""Files that a run is written to: spans for trace viewers, and a line per layer and step."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import astuple, fields
from io import FileIO
from pathlib import Path
from typing import Any

from hillinfer.errors import HillInferWarning, SettingsError
from hillinfer.system.files import make_folders
from hillinfer.trace.recorder import Detail, Lane, LayerStep, Span

# --- Files readable by their owner alone ---


def private_file(file: Path, what: str, option: str) -> FileIO:
    """Open a file or a link's name anew for writing, readable by its owner only.

    Whoever still writes to a file that was there before writes to that one, not into this. `what`
    it is and the `option` that names it are for SettingsError, raised where it cannot be made.
    """
    try:
        make_folders(file.parent)
        if file.is_symlink() or file.is_file():
            # A link is replaced, and what it leads to stays. Where a file cannot be taken away it
            # is emptied instead.
            with suppress(OSError):
                file.unlink()
        return FileIO(file, "w", opener=_private)
    except OSError as error:
        raise SettingsError(
            f"cannot write {what} to {file}: {error.strerror}; choose another {option}"
        ) from error


def _private(file: str, flags: int) -> int:
    descriptor = os.open(file, flags, 0o600)
    # A file that was there before keeps its mode otherwise.
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)
    return descriptor


class _OwnFile:
    """A file that is written to until it cannot be, which a warning says once; then it ends.

    Parameters and errors are those of `private_file`.
    """

    def __init__(self, file: Path, what: str, option: str) -> None:
        self._name = f"{what} {file}"
        self._out: FileIO | None = private_file(file, what, option)

    def _close(self, error: OSError | None = None) -> None:
        """Close the file, once; `error` is why it cannot be written any more."""
        out, self._out = self._out, None
        if out is None:
            return
        try:
            out.close()
        except OSError as other:
            error = error or other
        if error is not None:
            warnings.warn(
                f"{self._name} ends early: {error.strerror}; generation goes on",
                HillInferWarning,
                stacklevel=4,
            )


# --- The trace event format ---

PROCESS_NAME = "hillinfer"
_END = b"\n]\n"
_ORDER = {lane: place for place, lane in enumerate(Lane)}


class TraceFile(_OwnFile):
    """A JSON array of trace events, an event on each line.

    Every write ends with the closing bracket, which the next one overwrites, so a process that is
    killed leaves a whole file. Viewers want events of one thread to nest, so each thread has a
    number of its own in each lane. Not for several threads at once. `file` is replaced; times in it
    count from `origin`, in nanoseconds of `time.perf_counter_ns`.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file, "the trace", "--trace")
        self.origin = time.perf_counter_ns()
        self._process = os.getpid()
        self._threads: dict[tuple[Lane, int], int] = {}
        self._end = 0
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
        self._close()

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
            # What was whole before becomes whole again; its place is still there.
            with suppress(OSError):
                os.ftruncate(out.fileno(), self._end)
                os.pwrite(out.fileno(), _END, self._end)
            self._close(error)


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


def _thread_name(ident: int) -> str:
    names = (thread.name for thread in threading.enumerate() if thread.ident == ident)
    return next(names, f"thread {ident}")


# --- The recorder that writes it ---

# A step of a large model makes fewer; prefill may make more.
MOST_WAITING = 1 << 13


class Lanes:
    """A `Recorder` that brings spans into a trace file between steps.

    Writing a step's spans takes about as long as they are many, so it waits for the next step to
    begin; only so many that memory stays bounded, `most_waiting`, are written before. The file is
    closed with the recorder.
    """

    def __init__(self, file: TraceFile, most_waiting: int = MOST_WAITING) -> None:
        self._file = file
        self._most_waiting = most_waiting
        self._step = 0
        # Threads append at any time; no lock is needed for that.
        self._waiting: deque[Span] = deque()
        self._writing = threading.Lock()

    def begin_step(self, step: int) -> None:
        """Write what has been noted and begin a step; see `Recorder`."""
        self._flush()
        self._step = step

    def span(self, lane: Lane, name: str, **details: Detail) -> AbstractContextManager[None]:
        """Note how long a block takes; see `Recorder`."""
        return _Block(self, lane, name, details)

    def note(
        self,
        lane: Lane,
        name: str,
        start: int,
        stop: int,
        *,
        thread: int | None = None,
        **details: Detail,
    ) -> None:
        """Note what took from `start` to `stop`; see `Recorder`."""
        own = threading.get_ident() if thread is None else thread
        self._add(Span(lane, name, start, stop, own, self._step, details))

    def close(self) -> None:
        """Write what has been noted and close the file; harmless when done twice."""
        self._flush()
        with self._writing:
            self._file.close()

    def _add(self, span: Span) -> None:
        self._waiting.append(span)
        if len(self._waiting) >= self._most_waiting:
            self._flush()

    def _flush(self) -> None:
        with self._writing:
            # Others may append meanwhile; what they add comes with the next.
            count = len(self._waiting)
            self._file.append([self._waiting.popleft() for _ in range(count)])


class _Block:
    """Measures one `with` block."""

    __slots__ = ("_details", "_lane", "_lanes", "_name", "_start", "_step")

    def __init__(self, lanes: Lanes, lane: Lane, name: str, details: dict[str, Detail]) -> None:
        self._lanes = lanes
        self._lane = lane
        self._name = name
        self._details = details

    def __enter__(self) -> None:
        self._step = self._lanes._step
        self._start = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        stop, thread = time.perf_counter_ns(), threading.get_ident()
        self._lanes._add(
            Span(self._lane, self._name, self._start, stop, thread, self._step, self._details)
        )


# --- What happened to the hot pools ---

COLUMNS = tuple(field.name for field in fields(LayerStep))
_BUFFER_BYTES = 1 << 14


class PoolTimeline(_OwnFile):
    """A CSV file with a header and one line per layer, step and sequence; `file` is replaced.

    Lines come in the order in which promotions end, from any thread.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file, "the pool timeline", "--pool-timeline")
        self._lock = threading.Lock()
        self._waiting = bytearray((",".join(COLUMNS) + "\n").encode())

    def observe(self, entry: LayerStep) -> None:
        """Write one line; harmless after `close`."""
        # A microsecond is less than what a wait takes to measure.
        cells = [f"{cell:.6f}" if isinstance(cell, float) else str(cell) for cell in astuple(entry)]
        with self._lock:
            self._waiting += (",".join(cells) + "\n").encode()
            if len(self._waiting) >= _BUFFER_BYTES:
                self._flush()

    def close(self) -> None:
        """Bring everything into the file and close it; harmless when done twice."""
        with self._lock:
            self._flush()
            self._close()

    def _flush(self) -> None:
        if self._out is None:
            self._waiting.clear()
            return
        out = self._out
        try:
            while self._waiting:
                written = out.write(self._waiting)
                del self._waiting[:written]
        except OSError as error:
            self._waiting.clear()
            self._close(error)


def told(
    observe: Callable[[LayerStep], None] | None, timeline: PoolTimeline | None
) -> Callable[[LayerStep], None] | None:
    """Return what is called with every entry: the timeline first, where there is one."""
    if timeline is None:
        return observe
    if observe is None:
        return timeline.observe

    def note(entry: LayerStep) -> None:
        timeline.observe(entry)
        observe(entry)

    return note
