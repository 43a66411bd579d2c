# SPDX-License-Identifier: Apache-2.0
"""One processor scores everything: a plain NVMe drive."""

from __future__ import annotations

from hillinfer.app.latency_model import LatencyModel
from hillinfer.app.rates import seconds_of
from hillinfer.app.selected_shares import SelectedShares


class SharedScorer(LatencyModel):
    """T = (Mc + Ms)/fc + αc·Mc/Bc + αs·Ms/Bs: costs add, and nothing is there to balance.

    Mc is what lies in DRAM and Ms what lies on the drive. Where memory gives rows faster than the
    drive does, the latency falls with every token in DRAM, so the budget decides.

    Parameters
    ----------
    rates
        `f_s` is not looked at.
    """

    def latency(self, hosted: int, on_device: int, shares: SelectedShares) -> float:
        """Return the sum of all costs; see `LatencyModel`."""
        return (
            seconds_of(hosted + on_device, self.rates.f_c)
            + seconds_of(shares.alpha_c * hosted, self.rates.b_c)
            + seconds_of(shares.alpha_s * on_device, self.rates.b_s)
        )
