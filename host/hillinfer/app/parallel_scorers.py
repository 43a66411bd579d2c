# SPDX-License-Identifier: Apache-2.0
"""Host and device score side by side, each with its own rows (HillInfer equations 2 to 4)."""

from __future__ import annotations

import math

from hillinfer.app.latency_model import LatencyModel
from hillinfer.app.rates import seconds_of
from hillinfer.app.selected_shares import SelectedShares


class ParallelScorers(LatencyModel):
    """The paper's model: T = max(Mc/fc + αc·Mc/Bc, Ms/fs + αs·Ms/Bs), least where both are equal.

    Parameters
    ----------
    rates
        Of host, device, memory and drive.
    """

    def latency(self, hosted: int, on_device: int, shares: SelectedShares) -> float:
        """Return the seconds of the slower side (equation 2); see `LatencyModel`."""
        host, device = self.token_seconds(shares)
        return max(host * hosted if hosted else 0.0, device * on_device if on_device else 0.0)

    def token_seconds(self, shares: SelectedShares) -> tuple[float, float]:
        """Return the seconds of one token on the host's and on the device's side (equation 2)."""
        rates = self.rates
        return (
            seconds_of(1, rates.f_c) + seconds_of(shares.alpha_c, rates.b_c),
            seconds_of(1, rates.f_s) + seconds_of(shares.alpha_s, rates.b_s),
        )

    def beta(self, shares: SelectedShares) -> float:
        """Return β = Mc/Ms where both sides take equally long (equation 4).

        With αc = αs = α it is Bc·fc·(Bs + α·fs) / (Bs·fs·(Bc + α·fc)). Infinity where the device
        never ends or the host takes no time; 0 where the host never ends, or neither side takes
        any time.
        """
        host, device = self.token_seconds(shares)
        if math.isinf(device):
            return math.inf
        if math.isinf(host) or device == 0:
            return 0.0
        return math.inf if host == 0 else device / host

    def host_segments(
        self, segments: int, segment_tokens: int, shares: SelectedShares, most: int
    ) -> int:
        """Return β in whole segments: the better neighbour of equation 4; see `LatencyModel`."""
        beta, limit = self.beta(shares), min(segments, max(most, 0))
        exact = segments * (beta / (1 + beta) if math.isfinite(beta) else 1.0)
        # The larger of a rising and a falling line: nothing beyond the neighbours is better.
        below = min(math.floor(exact), limit)
        return self._best(range(below, min(below + 1, limit) + 1), segments, segment_tokens, shares)
