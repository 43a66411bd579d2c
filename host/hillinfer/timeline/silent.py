# SPDX-License-Identifier: Apache-2.0
"""The recorder of runs that nobody asked a trace of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Detail

# Without state, so that everybody can have the same one.
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
