# SPDX-License-Identifier: Apache-2.0
"""Notes spans of all lanes while a run goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType

from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Detail
from hillinfer.timeline.span import Span
from hillinfer.timeline.trace_file import TraceFile

# A step of a large model makes fewer; prefill may make more.
MOST_WAITING = 1 << 13


class Lanes:
    """A `Recorder` that brings spans into a trace file between steps.

    Writing a step's spans takes about as long as they are many, so it waits for the next step to
    begin; only so many that memory stays bounded are written before.

    Parameters
    ----------
    file
        Where to; closed with the recorder.
    most_waiting
        Spans that are held at most while no step begins.
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

    def note(self, lane: Lane, name: str, start: int, stop: int, **details: Detail) -> None:
        """Note what took from `start` to `stop`; see `Recorder`."""
        self._add(Span(lane, name, start, stop, threading.get_ident(), self._step, details))

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stop = time.perf_counter_ns()
        self._lanes._add(
            Span(
                self._lane,
                self._name,
                self._start,
                stop,
                threading.get_ident(),
                self._step,
                self._details,
            )
        )
