# SPDX-License-Identifier: Apache-2.0
"""What a decode step on a plain drive costs, by rates and budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hillinfer.app.rates import Rates, seconds_of
from hillinfer.app.selected_shares import SelectedShares
from hillinfer.app.shared_scorer import SharedScorer
from hillinfer.byte_size import format_bytes
from hillinfer.machine.finding import Finding, Verdict
from hillinfer.model_shape import ModelShape
from hillinfer.pools.budget_plan import BudgetPlan
from hillinfer.settings import Settings


@dataclass(frozen=True)
class PlainStep:
    """One decode step of all layers, modelled.

    As if hot tokens were selected no more often than cold ones: that is the most a step reads.

    Parameters
    ----------
    shape, settings
        Of the model and the cache, with a named shadow.
    tokens
        Of context.
    rates
        Of this machine, for one layer.
    layer_weights
        Weights of one layer's projections.
    weights_per_second
        Of a matrix product on this machine.
    """

    shape: ModelShape
    settings: Settings
    tokens: int
    rates: Rates
    layer_weights: int
    weights_per_second: float

    @property
    def plan(self) -> BudgetPlan:
        """What M0 holds."""
        return BudgetPlan.for_context(self.shape, self.settings, self.tokens)

    @property
    def hosted(self) -> int:
        """Tokens of each layer whose rows have room in DRAM."""
        plan = self.plan
        share = plan.hot_bytes / plan.all_rows_bytes if plan.all_rows_bytes else 1.0
        return int(self.tokens * min(max(share, 0.0), 1.0))

    @property
    def selected_share(self) -> float:
        """Selected over all tokens."""
        most = self.settings.max_selected
        return min(self.settings.alpha, most / self.tokens if most else 1.0)

    @property
    def layer_seconds(self) -> float:
        """Seconds of one layer's scoring and rows, by the shared scorer's model."""
        share = self.selected_share
        model = SharedScorer(self.rates)
        cold = self.tokens - self.hosted
        return model.latency(self.hosted, cold, SelectedShares(share, share))

    @property
    def streaming_seconds(self) -> float:
        """Seconds of one layer's streamed shadows at most: at the pace of scattered rows."""
        bytes_of_layer = self.plan.streamed_shadow_bytes / self.shape.layers
        return seconds_of(bytes_of_layer / self.shape.row_bytes, self.rates.b_s)

    @property
    def reading_seconds(self) -> float:
        """Seconds of one layer's cold rows."""
        cold = self.selected_share * (self.tokens - self.hosted)
        return seconds_of(cold, self.rates.b_s)

    @property
    def computing_seconds(self) -> float:
        """Seconds of one layer's projections in float32."""
        return seconds_of(self.layer_weights, self.weights_per_second)

    def findings(self, name: str) -> Iterator[Finding]:
        """Yield what a step takes, and advice on `--query`, which changes nothing by itself.

        Parameters
        ----------
        name
            Of the model's shape.

        Raises
        ------
        BudgetError
            Where the budget does not hold the least there must be.
        """
        plan = self.plan
        plan.check()
        layers = self.shape.layers
        total = layers * (self.layer_seconds + self.streaming_seconds)
        yield Finding(
            f"decode step of {name}",
            Verdict.OK,
            f"at most {_ms(total)} of scoring and rows at {self.tokens} tokens and "
            f"{format_bytes(plan.budget_bytes)} of DRAM (modelled: costs add, the budget decides): "
            f"shadow {format_bytes(plan.shadow_bytes)} in DRAM and "
            f"{format_bytes(plan.streamed_shadow_bytes)} streamed "
            f"(at most {_ms(layers * self.streaming_seconds)}), "
            f"rows of {self.tokens - self.hosted} tokens cold "
            f"({_ms(layers * self.reading_seconds)} at alpha {self.settings.alpha:g})",
        )
        yield Finding(
            "query",
            Verdict.OK,
            f"predicted hides up to {_ms(min(self.reading_seconds, self.computing_seconds))} of "
            f"{_ms(self.reading_seconds)} of reads per layer behind "
            f"{_ms(self.computing_seconds)} of compute (modelled, projections in float32); it "
            "changes which tokens are selected, so --query predicted or true is yours to choose",
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
