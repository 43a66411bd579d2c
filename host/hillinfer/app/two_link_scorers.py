# SPDX-License-Identifier: Apache-2.0
"""The variant of equation 4 that the paper's section 5.4 gives for figure 16b."""

from __future__ import annotations

from hillinfer.app.parallel_scorers import ParallelScorers
from hillinfer.app.rates import seconds_of
from hillinfer.app.selected_shares import SelectedShares


class TwoLinkScorers(ParallelScorers):
    """As `ParallelScorers`, but the device's rows pass two links, one after the other.

    Section 5.4 prints β = fc·(Bs·Bc + α·Bc·fs + α·Bs·fs) / (Bs·fs·(Bc + α·fc)) without a model.
    Divided by Bc·Bs·fs and by Bc·fc it reads (1/fs + α/Bs + α/Bc) / (1/fc + α/Bc): what balances
    Mc/fc + α·Mc/Bc with Ms/fs + α·Ms/Bs + α·Ms/Bc. So a row of the device comes to the host
    over the drive's link and then goes where the host's rows go, over the host's link.

    Parameters
    ----------
    rates
        Of host, device, memory and drive.
    """

    def token_seconds(self, shares: SelectedShares) -> tuple[float, float]:
        """Return the seconds of one token on each side; see `ParallelScorers`."""
        host, device = super().token_seconds(shares)
        return host, device + seconds_of(shares.alpha_s, self.rates.b_c)
