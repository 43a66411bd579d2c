# SPDX-License-Identifier: Apache-2.0
"""What one run of `hillinfer-bench traces` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hillinfer.errors import SettingsError
from hillinfer_bench.traces.request_trace import CARRIED_TRACES, RequestTrace

DEFAULT_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
# One process holds all copies: 10 GB at most.
_MOST_COPIES = 100


@dataclass(frozen=True)
class TracesRequest:
    """Traces, capacities and copies to replay.

    Parameters
    ----------
    files
        Traces in Mooncake's format; none for those that come along.
    shares
        Capacities over a trace's distinct blocks.
    copies
        Of the model toward large stores, the most; 0 for no model.
    index_chunks
        Chunks of the largest index that is filled; 0 for none.
    processes
        Replays at once.
    out
        Where the figures go as JSON; None for nowhere.
    """

    files: tuple[Path, ...]
    shares: tuple[float, ...]
    copies: int
    index_chunks: int
    processes: int
    out: Path | None

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises
        ------
        SettingsError
            Naming the option and what it allows.
        """
        for share in self.shares:
            if not 0 < share <= 1:
                raise SettingsError(f"capacities={share} must be above 0 and at most 1")
        if not 0 <= self.copies <= _MOST_COPIES:
            raise SettingsError(f"copies={self.copies} must be 0 to {_MOST_COPIES}")
        if self.index_chunks < 0:
            raise SettingsError(f"index_chunks={self.index_chunks} must be 0 or more")
        if self.processes < 1:
            raise SettingsError(f"processes={self.processes} must be at least 1")

    def traces(self) -> list[RequestTrace]:
        """Return the traces; TraceError where a file is none."""
        if self.files:
            return [RequestTrace.read(file) for file in self.files]
        return [RequestTrace.carried(name) for name in CARRIED_TRACES]
