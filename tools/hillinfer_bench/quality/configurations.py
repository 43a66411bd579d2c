# SPDX-License-Identifier: Apache-2.0
"""The rows of the quality table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hillinfer.devices.table import make_scorer
from hillinfer.model_shape import ModelShape
from hillinfer.pools.budget_plan import kernel_spec
from hillinfer.settings import Settings
from hillinfer_bench.policies.contract_selection import ContractSelection
from hillinfer_bench.policies.float_weights import FloatWeights
from hillinfer_bench.policies.pages import Pages
from hillinfer_bench.policies.recent_only import RecentOnly
from hillinfer_bench.policies.selection_policy import SelectionPolicy
from hillinfer_model.choices import KeyMode, Rule, Scope

_SHADOWS = (KeyMode.INT8, KeyMode.INT4, KeyMode.INT2)


@dataclass(frozen=True)
class Configuration:
    """One way to select tokens.

    Parameters
    ----------
    name
        As the table shows it.
    make
        Returns the policy for a model's shape and some settings.
    settings
        α and whatever the policy reads.
    """

    name: str
    make: Callable[[ModelShape, Settings], SelectionPolicy]
    settings: Settings

    def policy(self, shape: ModelShape) -> SelectionPolicy:
        """Return the policy."""
        return self.make(shape, self.settings)


def contract_configuration(settings: Settings) -> Configuration:
    """Return the product's own selection under some settings."""
    name = f"{settings.rule.value} {settings.key_mode.value.upper()}"
    if settings.scope is not Scope.LAYER:
        name += f" {settings.scope.value}"
    return Configuration(name, _contract, settings)


def table_configurations(alphas: Sequence[float]) -> list[Configuration]:
    """Return the rows of the default table: each α with every rule, shadow and comparison."""
    rows = []
    for alpha in alphas:
        settings = Settings().changed(alpha=alpha)
        rows.append(Configuration("float weights (ideal)", _float_weights, settings))
        rows += [
            contract_configuration(settings.changed(rule=rule, shadow=shadow))
            for rule in Rule
            for shadow in _SHADOWS
        ]
        rows.append(Configuration("pages of 16", _pages, settings))
        rows.append(Configuration("recent only", _recent_only, settings))
    return rows


def _contract(shape: ModelShape, settings: Settings) -> SelectionPolicy:
    scorer = make_scorer(settings.device, kernel_spec(shape, settings), settings.scope)
    return ContractSelection(scorer, settings)


def _float_weights(shape: ModelShape, settings: Settings) -> SelectionPolicy:
    return FloatWeights(settings)


def _pages(shape: ModelShape, settings: Settings) -> SelectionPolicy:
    return Pages(settings)


def _recent_only(shape: ModelShape, settings: Settings) -> SelectionPolicy:
    return RecentOnly(settings)
