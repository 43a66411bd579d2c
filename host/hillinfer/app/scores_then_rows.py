# SPDX-License-Identifier: Apache-2.0
"""Host and device score side by side, and rows come when all scores are there."""

from __future__ import annotations

from hillinfer.app.parallel_scorers import ParallelScorers
from hillinfer.app.rates import Rates, seconds_of
from hillinfer.app.selected_shares import SelectedShares


class ScoresThenRows(ParallelScorers):
    """T = max(Mc/fc, Ms/fs) + sharing where Ms > 0 + rows, as this runtime does it.

    An exact top α is known only when both sides have scored, and a row lies where its pool is, not
    where its segment is scored. So the selected rows are one term behind the larger of the two,
    and β does not change it. A launch and the merge of two sides cost a step as much for one
    segment as for many, so the latency is least at β = fc/fs or where the host scores everything.

    Parameters
    ----------
    rates
        Of host, device, memory and drive, and what sharing costs.
    row_seconds
        What the selected rows take, from pool and drive; where only β is asked for, it does not
        matter.
    """

    def __init__(self, rates: Rates, row_seconds: float = 0.0) -> None:
        super().__init__(rates)
        self._row_seconds = row_seconds

    def latency(self, hosted: int, on_device: int, shares: SelectedShares) -> float:
        """Return the seconds of the slower side, of sharing and of rows; see `LatencyModel`."""
        sharing = self.rates.sharing if on_device else 0.0
        return super().latency(hosted, on_device, shares) + sharing + self._row_seconds

    def token_seconds(self, shares: SelectedShares) -> tuple[float, float]:
        """Return the seconds in which a token is scored on each side."""
        return seconds_of(1, self.rates.f_c), seconds_of(1, self.rates.f_s)

    def host_segments(
        self, segments: int, segment_tokens: int, shares: SelectedShares, most: int
    ) -> int:
        """Return the better one of what balances both sides and of all segments.

        As long as the device has a segment, sharing costs the same, so what is least without it is
        least with it; where it has none, that is the most segments there are, and no cost.
        """
        balanced = super().host_segments(segments, segment_tokens, shares, most)
        most_there_is = min(segments, max(most, 0))
        return self._best((balanced, most_there_is), segments, segment_tokens, shares)
