# SPDX-License-Identifier: Apache-2.0
"""Records spans of time in any thread, and what each layer read from the drive per step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

# --- Lanes ---


class Lane(StrEnum):
    """What a span of time was spent on, in the order in which lanes are shown."""

    STEPS = "steps"
    """Forward passes, and in them the cache's part of each layer, waiting included."""
    COMPUTE = "compute"
    """The model between the cache's calls, and attention over rows that are there."""
    HOST_SCORING = "host scoring"
    """Coding and scoring of key shadows by the processor, and choosing the top α."""
    DEVICE_SCORING = "device scoring"
    """From the launch on a device until its last score has come."""
    READS = "reads"
    """Batches of reads from the drive."""
    COPIES = "copies"
    """Rows moved within DRAM: new ones stored, cold ones promoted."""
    WRITES = "writes"
    """Groups of rows and shadows written to the drive."""
    BUBBLES = "bubbles"
    """Passes that wait for rows, and writes put off until the drive has time for them."""


# --- Recorders ---

Detail = int | str


class Recorder(Protocol):
    """Takes spans of time from any thread.

    Spans of one thread in one lane lie one behind the other or inside each other.
    """

    def begin_step(self, step: int) -> None:
        """Note that spans that start from here on belong to this step."""
        ...

    def span(self, lane: Lane, name: str, **details: Detail) -> AbstractContextManager[None]:
        """Note how long a block takes, also where it raises.

        `lane` and `name` say where it is shown and as what, `details` what is shown with it, like
        `layer` and `bytes`.
        """
        ...

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
        """Note what took from `start` to `stop`, nanoseconds of `time.perf_counter_ns`.

        `thread` is a number of who did it, None for the caller itself. The other parameters are
        those of `span`.
        """
        ...

    def close(self) -> None:
        """Keep everything noted so far and note nothing more; harmless when done twice."""
        ...


# Without state, so that all callers can have the same one.
_NOTHING = nullcontext()


class Silent:
    """A `Recorder` that notes nothing."""

    def begin_step(self, step: int) -> None:
        """Do nothing."""

    def span(self, lane: Lane, name: str, **details: Detail) -> AbstractContextManager[None]:
        """Return what does nothing around a block."""
        return _NOTHING

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
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


SILENT = Silent()

# --- Spans ---


class Span(NamedTuple):
    """What one thread did for a while, shown in a lane by a name, with details.

    `start` and `stop` are nanoseconds; of `time.perf_counter_ns` while recorded, since the trace
    began in a file. `thread` tells threads apart; `step` had begun last when it started.
    """

    lane: Lane
    name: str
    start: int
    stop: int
    thread: int
    step: int
    details: Mapping[str, Detail]


# --- Spans of a forward pass ---


class ForwardSpans:
    """Notes the model's time between the cache's calls, layer by layer, and whole steps.

    A layer's model span goes from the end of its attention to the next call of the cache: its own
    output projection and MLP, and the next layer's projections. The one before layer 0 has no
    layer: the embedding, and the projections of layer 0.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._details: dict[str, int] = {}
        self._started = self._resumed = self._tokens = 0

    @classmethod
    def of(cls, recorder: Recorder) -> ForwardSpans | None:
        """Return what notes spans; None where nobody looks, which no layer then calls."""
        return None if recorder is SILENT else cls(recorder)

    def begin(self, tokens: int) -> None:
        """Begin a forward pass of so many tokens a row."""
        self._details = {}
        self._tokens = tokens
        self._started = self._resumed = time.perf_counter_ns()

    def announce(self) -> None:
        """Leave the model for what a predicted query sets going; `go_on` follows."""
        self._leave_model()

    def go_on(self) -> None:
        """Note that the model goes on after it."""
        self._resumed = time.perf_counter_ns()

    def store(self, layer: int) -> AbstractContextManager[None]:
        """Leave the model, and return what encloses the storing of a layer's rows."""
        self._leave_model()
        return self.recorder.span(Lane.COPIES, "store", layer=layer)

    def attend(self, layer: int) -> AbstractContextManager[None]:
        """Return what encloses a layer's attention; `resume` follows."""
        return self.recorder.span(Lane.STEPS, "attend", layer=layer)

    def resume(self, layer: int) -> None:
        """Note that the model goes on after a layer's attention."""
        self._details = {"layer": layer}
        self._resumed = time.perf_counter_ns()

    def end(self) -> None:
        """End the forward pass; one that breaks off leaves no step behind."""
        self._leave_model()
        stop = time.perf_counter_ns()
        self.recorder.note(Lane.STEPS, "step", self._started, stop, tokens=self._tokens)

    def _leave_model(self) -> None:
        stop = time.perf_counter_ns()
        self.recorder.note(Lane.COMPUTE, "model", self._resumed, stop, **self._details)


# --- Steps of a layer ---


@dataclass(frozen=True)
class ReadCost:
    """Calls to the drive, and the bytes they brought."""

    reads: int = 0
    byte_count: int = 0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(self.reads + other.reads, self.byte_count + other.byte_count)


@dataclass
class LayerStep:
    """One entry of the pools' timeline: one sequence in one layer and step.

    Parameters
    ----------
    step, layer, length
        Which step and layer, and the context length N.
    hot_rows, cold_rows
        Selected rows found in DRAM (hits) and on the drive (misses).
    promoted, demoted
        Rows that became hot, and those that gave way to them.
    reads, read_bytes
        Calls to the drive and the bytes they brought.
    wait_seconds
        Time that attention waited for rows.
    coded_tokens, coded_arrivals
        Selected tokens that came as codes, and those of them whose codes DRAM did not have.
    """

    step: int
    layer: int
    length: int
    hot_rows: int = 0
    cold_rows: int = 0
    promoted: int = 0
    demoted: int = 0
    reads: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0
    coded_tokens: int = 0
    coded_arrivals: int = 0

    def note_reads(self, cost: ReadCost) -> None:
        """Add what some rows took to read."""
        self.reads += cost.reads
        self.read_bytes += cost.byte_count
