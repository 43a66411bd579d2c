# SPDX-License-Identifier: Apache-2.0
"""What notes how long things took, and in which lane."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from hillinfer.timeline.lane import Lane

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
