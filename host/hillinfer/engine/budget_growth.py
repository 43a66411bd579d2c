# SPDX-License-Identifier: Apache-2.0
"""Plans the budget of a new cache: its key shadow's format, and growth of M0 with the context."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from hillinfer.drive.files import round_up
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec, open_ended_shadow_limit
from hillinfer.errors import BudgetError, SetupWarning
from hillinfer.memory_budget import Accountant
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.shadow.store import shadow_bytes
from hillinfer.system.machine import MemoryFacts
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
        budget for rows asks for. Where tokens may come as codes INT4 is taken as long as all of it
        fits: most selected tokens need no rows then, and INT2 has all come as rows. Where it does
        not fit, and nobody chose which tokens are exact, all are.

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
        given = tokens, sequences, beside_bytes
        if settings.exact is None and settings.has_coded_tokens:
            choice = cls._of_formats(shape, settings, *given)
            least = choice.plan.required_bytes + beside_bytes
            fits = choice.plan.budget_bytes >= least and not choice.plan.streamed_shadow_bytes
            if fits and choice.settings.has_coded_tokens:
                return choice
            settings = replace(settings, exact=1.0)
        return cls._of_formats(shape, settings, *given)

    @classmethod
    def _of_formats(
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
            suits = plan.leaves_half_for_rows or named.has_coded_tokens
            if fits and suits and not plan.streamed_shadow_bytes:
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

    Attributes
    ----------
    covered
        Distinct tokens that the budget is for: `cover` does nothing for as many.
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
        self.covered = growth.planned_tokens

    def cover(self, tokens: int) -> None:
        """Make the budget that of so many distinct tokens, in steps of 1,024."""
        if tokens <= self.covered:
            return
        covered = round_up(tokens, GROWTH_TOKENS)
        budget_bytes, limit_bytes = self._growth.at(covered)
        self._accountant.raise_to(budget_bytes)
        self._raise_shadow_limit(limit_bytes)
        # Last: what broke off in between is done again.
        self.covered = covered


# --- what a new cache is made with ---

# Of the longest: as many as budgets grow for; address space is reserved for all of them.
_MOST_CONTEXTS = 32


@dataclass(frozen=True)
class CachePlan:
    """What a runtime is made with.

    Parameters
    ----------
    settings
        With a named shadow.
    budget_bytes, shadow_limit_bytes
        M0 and the most bytes of full shadows in DRAM, at first where `growth` is given.
    announce_streaming
        Called before the first shadow goes to the drive.
    growth
        How a budget that is a share follows the context; None for a budget in bytes.
    warning
        What a user should know before the cache is used, or None.
    """

    settings: Settings
    budget_bytes: int
    shadow_limit_bytes: int
    announce_streaming: Callable[[], None]
    growth: BudgetGrowth | None = None
    warning: str | None = None

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        settings: Settings,
        expected_tokens: int | None,
        sequences: int,
    ) -> CachePlan:
        """Plan a cache, of unknown length where none is expected.

        Raises
        ------
        BudgetError
            Where a budget in bytes is too small for what is expected.
        SettingsError
            Where the shadow is to be chosen and the length unknown.
        """
        share = settings.dram_budget.share is not None
        if expected_tokens is None and not share:
            return cls._in_bytes(shape, settings)
        if expected_tokens is None:
            # Refused where the shadow's format is still to be chosen.
            kernel_spec(shape, settings)
            growth = _growth(shape, settings, GROWTH_TOKENS, sequences)
            return cls(settings, *growth.at(GROWTH_TOKENS), _warner(shape, settings), growth)
        choice = ShadowChoice.of(shape, settings, expected_tokens, sequences)
        choice.plan.check()
        return cls(
            choice.settings,
            choice.plan.budget_bytes,
            choice.limit_bytes,
            # The plan's own warning says it, and sooner.
            say_nothing if choice.warning or not share else _warner(shape, choice.settings),
            _growth(shape, choice.settings, expected_tokens, sequences) if share else None,
            choice.warning,
        )

    @classmethod
    def _in_bytes(cls, shape: ModelShape, settings: Settings) -> CachePlan:
        budget_bytes = settings.dram_budget.resolve(0)
        if settings.exact is None and settings.has_coded_tokens:
            # What codes need beside rows grows with the context, and nobody knows how long it gets.
            plan = BudgetPlan.with_whole_shadow(shape, settings, shape.max_positions)
            if plan.required_bytes > budget_bytes:
                settings = replace(settings, exact=1.0)
        limit = open_ended_shadow_limit(shape, settings, budget_bytes)
        return cls(settings, budget_bytes, limit, _warner(shape, settings))


def _growth(shape: ModelShape, settings: Settings, tokens: int, sequences: int) -> BudgetGrowth:
    most_tokens = shape.max_positions * max(sequences, _MOST_CONTEXTS)
    longest = settings.dram_budget.resolve(most_tokens * shape.token_bytes)
    memory = MemoryFacts.read()
    most = min(longest, memory.available_bytes)
    # Address space is reserved for it, and other things need some, too.
    if memory.address_bytes is not None:
        most = min(most, memory.address_bytes // 2)
    return BudgetGrowth(shape, settings, planned_tokens=tokens * sequences, most_bytes=most)


def say_nothing() -> None:
    """Say nothing: the plan's warning did."""


def _warner(shape: ModelShape, settings: Settings) -> Callable[[], None]:
    segment = shape.layers * shadow_bytes(kernel_spec(shape, settings))
    return partial(_warn_of_streaming, segment)


def _warn_of_streaming(segment_bytes: int) -> None:
    warnings.warn(
        "half of the DRAM budget is left for rows, and the key shadow has outgrown the rest: from "
        f"here on, {format_bytes(segment_bytes)} more are read from the drive for every new token "
        "with every 1,024 tokens of context; raise dram_budget to keep them in memory, or say how "
        "long the context gets with new_cache(expected_tokens=...)",
        SetupWarning,
        stacklevel=2,
    )


# --- what caches that are open together have room for ---


@dataclass(frozen=True)
class SharedNeed:
    """What the caches of one engine are said to get together.

    Parameters
    ----------
    caches
        How many there are.
    tokens
        Of all of them; None where nobody knows how long one gets.
    sequences
        Of different rows.
    lent_bytes
        Of the budget, which ordinary caches have until they are closed.
    """

    caches: int
    tokens: int | None
    sequences: int
    lent_bytes: int = 0

    def shadow_limit(self, shape: ModelShape, settings: Settings, budget_bytes: int) -> int:
        """Return the most bytes of full shadows in DRAM, where a budget in bytes has room for all.

        Parameters
        ----------
        shape, settings
            Of the model and its caches.
        budget_bytes
            M0.

        Raises
        ------
        BudgetError
            Where it has not.
        """
        left = budget_bytes - self.lent_bytes
        if self.tokens is None:
            return open_ended_shadow_limit(shape, settings, left)
        given = replace(settings, dram_budget=ByteSize(byte_count=max(1, left)))
        sequences = max(1, self.sequences)
        each = max(1, -(-self.tokens // sequences))
        plan = BudgetPlan.for_context(shape, given, each, sequences)
        try:
            plan.check()
        except BudgetError as error:
            lent = f"; {format_bytes(self.lent_bytes)} of it are lent" if self.lent_bytes else ""
            raise BudgetError(
                f"{self.caches} caches of this model share one DRAM budget, and {self.tokens} "
                f"tokens in {self.sequences} sequences are expected of them together{lent}: "
                f"{error}, or close a cache first"
            ) from error
        return plan.shadow_limit(kernel_spec(shape, given), shape.layers, sequences)
