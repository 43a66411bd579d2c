# SPDX-License-Identifier: Apache-2.0
"""β as a latency model has it, corrected while a run goes on."""

from __future__ import annotations

from hillinfer.app.latency_model import LatencyModel
from hillinfer.app.selected_shares import RunningShares


class AutoBeta:
    """A `HostShare` that solves β anew whenever a segment is to be placed.

    Parameters
    ----------
    model
        Whose latency is to be least.
    segment_tokens
        Tokens of a segment.
    alpha
        Importance rate α, for both sides until their own shares are known.
    most_segments
        Segments of each layer whose shadows the DRAM budget has room for (equation 3).
    """

    def __init__(
        self, model: LatencyModel, segment_tokens: int, alpha: float, most_segments: int
    ) -> None:
        self.model = model
        self._segment_tokens = segment_tokens
        self._most = most_segments
        self._running = RunningShares(alpha)

    def host_segments(self, segments: int) -> int:
        """Return how many of the first segments the host is to score, by what is known now."""
        return self.model.host_segments(
            segments, self._segment_tokens, self._running.shares, self._most
        )

    def note(
        self, host_scored: int, host_selected: int, device_scored: int, device_selected: int
    ) -> None:
        """Learn what was selected of what each side scored."""
        self._running.note(host_scored, host_selected, device_scored, device_selected)
