# SPDX-License-Identifier: Apache-2.0
"""A DRAM budget that follows a context of unknown length, and the shadow format it has room for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from hillinfer.drive.files import round_up
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.memory_budget import Accountant
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.values import ByteSize, format_bytes
from hillinfer_model.choices import KeyMode

# --- the shadow's format ---

# INT8 selects no better than INT4 by perplexity and agreement, and a step reads twice the bytes
# (docs/quality.md); it is taken where it is named.
AUTO_FORMATS = (KeyMode.INT4, KeyMode.INT2)
_GIB = 1 << 30


@dataclass(frozen=True)
class ShadowChoice:
    """Settings whose shadow format is named, and the plan of M0 under them.

    Parameters
    ----------
    settings
        With a named format.
    plan
        For the context and sequences that were given.
    limit_bytes
        Most bytes of full shadows in DRAM.
    """

    settings: Settings
    plan: BudgetPlan
    limit_bytes: int

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        settings: Settings,
        tokens: int,
        sequences: int = 1,
        beside_bytes: int = 0,
    ) -> ShadowChoice:
        """Take the format that was named, or INT4 or INT2, the first that leaves half for rows.

        Where neither does, INT2 is taken and as much of it streamed from the drive as half the
        budget for rows asks for.

        Parameters
        ----------
        shape, settings, tokens, sequences
            As in `BudgetPlan.for_context`. A budget that is a share of the KV cache is never less
            than what works; one in bytes is what it is.
        beside_bytes
            What else the budget must hold; no part of the plan.
        """
        budget = settings.dram_budget
        if budget.share is None:
            return cls._in_bytes(shape, settings, tokens, sequences, beside_bytes)
        wanted = budget.resolve(tokens * sequences * shape.token_bytes)
        works = working_bytes(shape, settings, tokens, wanted, sequences, beside_bytes)
        given = replace(settings, dram_budget=ByteSize(byte_count=works))
        choice = cls._in_bytes(shape, given, tokens, sequences, beside_bytes)
        return replace(choice, settings=replace(choice.settings, dram_budget=budget))

    @classmethod
    def _in_bytes(
        cls,
        shape: ModelShape,
        settings: Settings,
        tokens: int,
        sequences: int,
        beside_bytes: int,
    ) -> ShadowChoice:
        if settings.shadow is not None:
            plan = BudgetPlan.for_context(shape, settings, tokens, sequences)
            return cls._made(shape, settings, plan, sequences)
        for mode in AUTO_FORMATS:
            named = replace(settings, shadow=mode)
            plan = BudgetPlan.for_context(shape, named, tokens, sequences)
            fits = plan.budget_bytes >= plan.required_bytes + beside_bytes
            if fits and not plan.streamed_shadow_bytes and plan.leaves_half_for_rows:
                return cls._made(shape, named, plan, sequences)
        if not plan.streamed_shadow_bytes:
            streamed = plan.streamed(kernel_spec(shape, named), shape.layers, sequences)
            # The buffers of streaming may be more than a small shadow.
            plan = streamed if streamed.hot_bytes > plan.hot_bytes else plan
        return cls._made(shape, named, plan, sequences)

    @property
    def warning(self) -> str | None:
        """What streaming costs, or None where the whole shadow is in DRAM."""
        streamed = self.plan.streamed_shadow_bytes
        if not streamed:
            return None
        milliseconds = streamed / _GIB * 1e3
        return (
            f"{format_bytes(streamed)} of the {self.settings.key_mode.value} key shadow stay on "
            f"the drive, because half of a DRAM budget of {format_bytes(self.plan.budget_bytes)} "
            f"is left for rows: they are read for every new token, {milliseconds:.1f} ms at "
            "1 GiB/s; raise --dram-budget to keep them in memory"
        )

    @classmethod
    def _made(
        cls, shape: ModelShape, settings: Settings, plan: BudgetPlan, sequences: int
    ) -> ShadowChoice:
        limit = plan.shadow_limit(kernel_spec(shape, settings), shape.layers, sequences)
        return cls(settings, plan, limit)


def working_bytes(
    shape: ModelShape,
    settings: Settings,
    tokens: int,
    wanted_bytes: int,
    sequences: int = 1,
    beside_bytes: int = 0,
) -> int:
    """Return a budget in bytes, or the least that works where it is too small.

    The buffers do not shrink with the context, so they alone are more than a share of a short one.
    The least has the whole shadow in DRAM as long as that takes no more than twice as much: a
    shadow on the drive is read for every new token.

    Parameters
    ----------
    shape, settings, tokens, sequences, beside_bytes
        As in `ShadowChoice.of`; the settings' budget is not looked at.
    wanted_bytes
        The budget.
    """

    def choice(budget_bytes: int) -> ShadowChoice:
        given = replace(settings, dram_budget=ByteSize(byte_count=budget_bytes))
        return ShadowChoice.of(shape, given, tokens, sequences, beside_bytes)

    plan = choice(wanted_bytes).plan
    if plan.budget_bytes >= plan.required_bytes + beside_bytes:
        return wanted_bytes
    narrowest = replace(settings, shadow=settings.shadow or AUTO_FORMATS[-1])
    whole = BudgetPlan.with_whole_shadow(shape, narrowest, tokens, sequences)
    if whole.required_bytes <= 2 * plan.required_bytes:
        plan = whole
    return plan.required_bytes + beside_bytes


# --- A DRAM budget that follows a context of unknown length ---

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
