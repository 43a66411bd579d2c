# SPDX-License-Identifier: Apache-2.0
"""Records how long things took, in which lane of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
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

        Parameters
        ----------
        lane, name
            Where it is shown and as what.
        details
            Shown with it, like `layer` and `bytes`.
        """
        ...

    def note(self, lane: Lane, name: str, start: int, stop: int, **details: Detail) -> None:
        """Note what took from `start` to `stop`, nanoseconds of `time.perf_counter_ns`.

        The other parameters are those of `span`.
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

    def note(self, lane: Lane, name: str, start: int, stop: int, **details: Detail) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


SILENT = Silent()

# --- Spans ---


class Span(NamedTuple):
    """What one thread did for a while.

    Parameters
    ----------
    lane, name
        Where it is shown and as what.
    start, stop
        Nanoseconds; of `time.perf_counter_ns` while recorded, since the trace began in a file.
    thread
        Tells threads apart.
    step
        The step that had begun last when it started.
    details
        Shown with it.
    """

    lane: Lane
    name: str
    start: int
    stop: int
    thread: int
    step: int
    details: Mapping[str, Detail]
