# SPDX-License-Identifier: Apache-2.0
"""What one run of `hillinfer-bench pools` was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer.errors import SettingsError
from hillinfer.settings import Settings
from hillinfer_bench.quality.texts import TextsRequest


@dataclass(frozen=True)
class PoolsRequest(TextsRequest):
    """As `TextsRequest`; threads are traces recorded or replayed at once.

    The picture goes beside the JSON as PNG. With `exact` below 1 pools of exact rows and of codes
    are replayed in place of policies, and there is no picture.
    """

    exact: float = 1.0
    budgets: tuple[str, ...] = ("25%", "33%", "40%")

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, before a model is loaded; see `TextsRequest`."""
        super().__post_init__()
        if self.out is not None and self.out.suffix == ".png":
            raise SettingsError(f"out={self.out} is for JSON: the picture goes beside it as .png")
        for budget in self.budgets:
            Settings().changed(exact=self.exact, dram_budget=budget)
        for settings in self.trace_settings():
            if settings.importance_rate == 1.0:
                raise SettingsError("alpha=1.0 selects everything: give a smaller --alpha")

    def trace_settings(self) -> list[Settings]:
        """Return what is recorded: the default rule and shadow, and the paper's rule in INT8."""
        return [
            Settings().changed(alpha=alpha, rule=rule, shadow=shadow)
            for rule, shadow in (("weight_sum", "int4"), ("raw_sum", "int8"))
            for alpha in self.alphas
        ]

    def coded_settings(self) -> list[Settings]:
        """Return what is recorded where some tokens are coded."""
        return [Settings().changed(alpha=alpha, exact=self.exact) for alpha in self.alphas]
