# SPDX-License-Identifier: Apache-2.0
"""A DRAM budget that follows a context of unknown length."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from hillinfer.model_shape import ModelShape
from hillinfer.pools.accountant import Accountant
from hillinfer.pools.budget_plan import BudgetPlan
from hillinfer.pools.shadow_choice import ShadowChoice
from hillinfer.settings import Settings
from hillinfer.storage.aligned_buffer import round_up

# Shadows and most tables grow by so many tokens, too.
GROWTH_TOKENS = 1024


@dataclass(frozen=True)
class BudgetGrowth:
    """How a budget that is a share of the KV cache grows with it.

    Whether shadows stay in DRAM is decided for the longest context that the model takes: where the
    share holds them then, they stay from the start, and a short context gets what they need.

    Parameters
    ----------
    shape, settings
        Of the model and the cache; the budget is a share and the shadow named.
    planned_tokens
        Distinct tokens that the first budget is for.
    most_bytes
        No share is more than that; what must be held may be.
    """

    shape: ModelShape
    settings: Settings
    planned_tokens: int
    most_bytes: int

    def at(self, tokens: int) -> tuple[int, int]:
        """Return the budget and the limit of full shadows in DRAM, in bytes, for a context."""
        if self._keeps_shadows:
            plan = BudgetPlan.with_whole_shadow(self.shape, self.settings, tokens)
            limit = sys.maxsize
        else:
            choice = ShadowChoice.of(self.shape, self.settings, tokens)
            plan, limit = choice.plan, choice.limit_bytes
        return max(plan.required_bytes, min(plan.budget_bytes, self.most_bytes)), limit

    @property
    def _keeps_shadows(self) -> bool:
        longest = ShadowChoice.of(self.shape, self.settings, self.shape.max_positions)
        return not longest.plan.streamed_shadow_bytes


class FollowingBudget:
    """Raises the budget as tokens come; it never falls.

    Parameters
    ----------
    growth
        By how much.
    accountant
        Has the budget.
    raise_shadow_limit
        Called with the bytes of full shadows that may stay in DRAM.
    """

    def __init__(
        self,
        growth: BudgetGrowth,
        accountant: Accountant,
        raise_shadow_limit: Callable[[int], None],
    ) -> None:
        self._growth = growth
        self._accountant = accountant
        self._raise_shadow_limit = raise_shadow_limit
        self._covered = growth.planned_tokens

    def cover(self, tokens: int) -> None:
        """Make the budget that of so many distinct tokens, in steps of 1,024."""
        if tokens <= self._covered:
            return
        self._covered = round_up(tokens, GROWTH_TOKENS)
        budget_bytes, limit_bytes = self._growth.at(self._covered)
        self._accountant.raise_to(budget_bytes)
        self._raise_shadow_limit(limit_bytes)
