# SPDX-License-Identifier: Apache-2.0
"""What a new cache is made with: budget, shadow, and how both follow the context."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hillinfer.byte_size import format_bytes
from hillinfer.errors import SettingsError, SetupWarning
from hillinfer.machine.memory import MemoryFacts
from hillinfer.model_shape import ModelShape
from hillinfer.pools.budget_plan import kernel_spec, open_ended_shadow_limit
from hillinfer.pools.following_budget import GROWTH_TOKENS, BudgetGrowth
from hillinfer.pools.shadow_choice import ShadowChoice
from hillinfer.setting_values import whole_number
from hillinfer.settings import Settings
from hillinfer.storage.shadow_store import shadow_bytes

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
            _said if choice.warning or not share else _warner(shape, choice.settings),
            _growth(shape, choice.settings, expected_tokens, sequences) if share else None,
            choice.warning,
        )

    @classmethod
    def _in_bytes(cls, shape: ModelShape, settings: Settings) -> CachePlan:
        budget_bytes = settings.dram_budget.resolve(0)
        limit = open_ended_shadow_limit(shape, settings, budget_bytes)
        return cls(settings, budget_bytes, limit, _warner(shape, settings))


def checked_count(name: str, value: Any) -> int:
    """Return an argument that counts something; SettingsError where it is no number from 1 on."""
    count = whole_number(name, value)
    if count < 1:
        raise SettingsError(f"{name}={count} must be at least 1")
    return count


def _growth(shape: ModelShape, settings: Settings, tokens: int, sequences: int) -> BudgetGrowth:
    most_tokens = shape.max_positions * max(sequences, _MOST_CONTEXTS)
    longest = settings.dram_budget.resolve(most_tokens * shape.token_bytes)
    memory = MemoryFacts.read()
    most = min(longest, memory.available_bytes)
    # Address space is reserved for it, and other things need some, too.
    if memory.address_bytes is not None:
        most = min(most, memory.address_bytes // 2)
    return BudgetGrowth(shape, settings, planned_tokens=tokens * sequences, most_bytes=most)


def _said() -> None:
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
