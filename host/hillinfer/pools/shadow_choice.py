# SPDX-License-Identifier: Apache-2.0
"""Which number format the key shadow takes, and whether it fits in DRAM."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hillinfer.byte_size import ByteSize, format_bytes
from hillinfer.model_shape import ModelShape
from hillinfer.pools.budget_plan import BudgetPlan, kernel_spec
from hillinfer.settings import Settings
from hillinfer_model.choices import KeyMode

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
