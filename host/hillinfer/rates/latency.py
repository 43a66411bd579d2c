# SPDX-License-Identifier: Apache-2.0
"""Models of a layer's latency, and the β that each solves for (HillInfer equations 2 to 4)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hillinfer.rates.kept_rates import Rates, seconds_of
from hillinfer.settings import ModelName

# --- Selected shares of host and device ---


@dataclass(frozen=True)
class SelectedShares:
    """What stands for α in equation 2 once it is known that one side's tokens matter more.

    Of the tokens that the host and the device score.
    """

    alpha_c: float
    alpha_s: float


# --- The interface ---


class LatencyModel(ABC):
    """How long one layer's decode step takes to score and to read, by `latency` of a subclass."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    @abstractmethod
    def latency(self, hosted: int, on_device: int, shares: SelectedShares) -> float:
        """Return the modelled seconds.

        `hosted` and `on_device` are Mc and Ms: tokens on the host's side and on the other one.
        """
        ...

    def host_segments(
        self, segments: int, segment_tokens: int, shares: SelectedShares, most: int
    ) -> int:
        """Return how many whole segments on the host's side make the latency least.

        Of equally good ones the fewest: host memory is what is scarce. Models whose β has a closed
        form need not look at all of them. `most` is how many segments host memory has room for the
        shadows of: Mc <= M0 (equation 3).
        """
        return self._best(range(min(segments, max(most, 0)) + 1), segments, segment_tokens, shares)

    def _best(
        self, candidates: Sequence[int], segments: int, segment_tokens: int, shares: SelectedShares
    ) -> int:
        def seconds(count: int) -> float:
            hosted = count * segment_tokens
            return self.latency(hosted, segments * segment_tokens - hosted, shares)

        # Where every way takes for ever, the device never answers: the host takes what it can.
        best = min(candidates, key=seconds)
        return candidates[-1] if math.isinf(seconds(best)) else best


# --- The models ---


class ParallelScorers(LatencyModel):
    """The paper's: T = max(Mc/fc + αc·Mc/Bc, Ms/fs + αs·Ms/Bs), least where both are equal."""

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


class ScoresThenRows(ParallelScorers):
    """T = max(Mc/fc, Ms/fs) + sharing where Ms > 0 + rows, as this runtime does it.

    An exact top α is known only when both sides have scored, and a row lies where its pool is, not
    where its segment is scored. So the selected rows are one term behind the larger of the two, and
    β does not change it. A launch and the merge of two sides cost a step as much for one segment as
    for many, so the latency is least at β = fc/fs or where the host scores everything.
    `row_seconds` is what the selected rows take, from pool and drive; where only β is asked for, it
    does not matter.
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


class TwoLinkScorers(ParallelScorers):
    """As `ParallelScorers`, but the device's rows pass two links (HillInfer, figure 16b).

    Section 5.4 prints β = fc·(Bs·Bc + α·Bc·fs + α·Bs·fs) / (Bs·fs·(Bc + α·fc)) without a model.
    Divided by Bc·Bs·fs and by Bc·fc it reads (1/fs + α/Bs + α/Bc) / (1/fc + α/Bc): what balances
    Mc/fc + α·Mc/Bc with Ms/fs + α·Ms/Bs + α·Ms/Bc. So a row of the device comes to the host
    over the drive's link and then goes where the host's rows go, over the host's link.
    """

    def token_seconds(self, shares: SelectedShares) -> tuple[float, float]:
        """Return the seconds of one token on each side; see `ParallelScorers`."""
        host, device = super().token_seconds(shares)
        return host, device + seconds_of(shares.alpha_s, self.rates.b_c)


class SharedScorer(LatencyModel):
    """T = (Mc + Ms)/fc + αc·Mc/Bc + αs·Ms/Bs: costs add, and nothing is there to balance.

    Mc is what lies in DRAM and Ms what lies on the drive. Where memory gives rows faster than the
    drive does, the latency falls with every token in DRAM, so the budget decides. Of the rates
    `f_s` is not looked at.
    """

    def latency(self, hosted: int, on_device: int, shares: SelectedShares) -> float:
        """Return the sum of all costs; see `LatencyModel`."""
        return (
            seconds_of(hosted + on_device, self.rates.f_c)
            + seconds_of(shares.alpha_c * hosted, self.rates.b_c)
            + seconds_of(shares.alpha_s * on_device, self.rates.b_s)
        )


# --- β during a run ---


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
        self._alpha = alpha
        # Tokens that each side scored, and how many of them were selected.
        self._host = [0, 0]
        self._device = [0, 0]

    def host_segments(self, segments: int) -> int:
        """Return how many of the first segments the host is to score, by what is known now."""
        return self.model.host_segments(segments, self._segment_tokens, self.shares, self._most)

    def note(
        self, host_scored: int, host_selected: int, device_scored: int, device_selected: int
    ) -> None:
        """Learn what was selected of what each side scored."""
        for side, scored, selected in (
            (self._host, host_scored, host_selected),
            (self._device, device_scored, device_selected),
        ):
            side[0] += scored
            side[1] += selected

    @property
    def shares(self) -> SelectedShares:
        """Running means of the selected shares: all selected over all scored tokens so far."""
        return SelectedShares(self._mean(self._host), self._mean(self._device))

    def _mean(self, side: list[int]) -> float:
        scored, selected = side
        return selected / scored if scored else self._alpha


# --- The table of models ---

LATENCY_MODELS: Mapping[ModelName, Callable[[Rates], LatencyModel]] = MappingProxyType(
    {
        ModelName.SCORES_THEN_ROWS: ScoresThenRows,
        ModelName.PARALLEL: ParallelScorers,
        ModelName.TWO_LINKS: TwoLinkScorers,
    }
)
