# SPDX-License-Identifier: Apache-2.0
"""How long the tokens of one layer take to be scored and their selected rows to arrive."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from hillinfer.app.rates import Rates
from hillinfer.app.selected_shares import SelectedShares


class LatencyModel(ABC):
    """A model of one decode step of one layer; subclasses override `latency`.

    Parameters
    ----------
    rates
        Of host, device, memory and drive.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    @abstractmethod
    def latency(self, hosted: int, on_device: int, shares: SelectedShares) -> float:
        """Return the modelled seconds.

        Parameters
        ----------
        hosted, on_device
            Mc and Ms: tokens on the host's side and on the other one.
        shares
            Selected share of each side's tokens.
        """
        ...

    def host_segments(
        self, segments: int, segment_tokens: int, shares: SelectedShares, most: int
    ) -> int:
        """Return how many whole segments on the host's side make the latency least.

        Of equally good ones the fewest: host memory is what is scarce. Models whose β has a closed
        form need not look at all of them.

        Parameters
        ----------
        segments, segment_tokens
            All of them, and the tokens of each.
        shares
            As for `latency`.
        most
            Segments whose shadows host memory has room for: Mc <= M0 (equation 3).
        """
        return self._best(range(min(segments, max(most, 0)) + 1), segments, segment_tokens, shares)

    def _best(
        self,
        candidates: Sequence[int],
        segments: int,
        segment_tokens: int,
        shares: SelectedShares,
    ) -> int:
        def seconds(count: int) -> float:
            hosted = count * segment_tokens
            return self.latency(hosted, segments * segment_tokens - hosted, shares)

        # Where every way takes for ever, the device never answers: the host takes what it can.
        best = min(candidates, key=seconds)
        return candidates[-1] if math.isinf(seconds(best)) else best
