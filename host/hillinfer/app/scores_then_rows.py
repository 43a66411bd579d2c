# SPDX-License-Identifier: Apache-2.0
"""Host and device score side by side, and rows come when all scores are there."""

from __future__ import annotations

from hillinfer.app.parallel_scorers import ParallelScorers
from hillinfer.app.rates import Rates, seconds_of
from hillinfer.app.selected_shares import SelectedShares


class ScoresThenRows(ParallelScorers):
    """T = max(Mc/fc, Ms/fs) + the rows' time, which β does not change: what this runtime does.

    An exact top α is known only when both sides have scored, and a row lies where its pool is, not
    where its segment is scored. So the selected rows are one term behind the larger of the two, and
    the latency is least at β = fc/fs.

    Parameters
    ----------
    rates
        Of host, device, memory and drive.
    row_seconds
        What the selected rows take, from pool and drive; where only β is asked for, it does not
        matter.
    """

    def __init__(self, rates: Rates, row_seconds: float = 0.0) -> None:
        super().__init__(rates)
        self._row_seconds = row_seconds

    def latency(self, hosted: int, on_device: int, shares: SelectedShares) -> float:
        """Return the seconds of the slower side and of the rows; see `LatencyModel`."""
        return super().latency(hosted, on_device, shares) + self._row_seconds

    def token_seconds(self, shares: SelectedShares) -> tuple[float, float]:
        """Return the seconds in which a token is scored on each side."""
        return seconds_of(1, self.rates.f_c), seconds_of(1, self.rates.f_s)
