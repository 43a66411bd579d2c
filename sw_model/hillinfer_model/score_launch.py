# SPDX-License-Identifier: Apache-2.0
"""One launch of `score_tokens`, as the kernel sees it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from hillinfer_model.beats import Beats, check_beats
from hillinfer_model.choices import Scope

# What the scope argument of a launch says; any other number is refused by the kernel.
SCOPE_NUMBERS = MappingProxyType({Scope.LAYER: 0, Scope.KV_HEAD: 1})
# Of the scope argument: its low byte is the scope, and what lies above says how many queries come
# beside the first (contract, section 17).
_SCOPE_BITS = 8


def scope_number(scope: Scope, queries: int = 1) -> int:
    """Return the scope argument of a launch whose segments have so many queries each."""
    return SCOPE_NUMBERS[scope] | (queries - 1) << _SCOPE_BITS


def scope_of(number: int, most_queries: int) -> tuple[Scope, int] | None:
    """Return the scope and the queries of a segment that a scope argument says; None: it is wrong.

    Parameters
    ----------
    number
        The argument, unsigned 32 bit.
    most_queries
        That the kernel knows.
    """
    further, own = divmod(number, 1 << _SCOPE_BITS)
    for scope, known in SCOPE_NUMBERS.items():
        if own == known and further < most_queries:
            return scope, further + 1
    return None


@dataclass(frozen=True)
class ScoreLaunch:
    """Buffers and scalars of one `score_tokens` (contract, section 10).

    Every buffer is uint8 of shape (beats, 64), before the launch.

    Parameters
    ----------
    segments
        One descriptor per segment.
    shadow
        Shadows; in key mode `fp16` the rows.
    statistics
        Statistics blocks in key mode `fp16`, else (0, 64).
    queries
        Query blocks.
    scores
        Content before the launch.
    scope
        The number the kernel is given, unsigned 32 bit: from `scope_number`, or a wrong one.
    launch_id
        Unsigned 32 bit.

    Raises
    ------
    ValueError
        Where a buffer has another type or shape, or a number does not fit its register.
    """

    segments: Beats
    shadow: Beats
    statistics: Beats
    queries: Beats
    scores: Beats
    scope: int
    launch_id: int

    def __post_init__(self) -> None:
        """Refuse what is no block of beats or no 32-bit number."""
        for name in ("segments", "shadow", "statistics", "queries", "scores"):
            check_beats(getattr(self, name), name)
        for name in ("scope", "launch_id"):
            if not 0 <= getattr(self, name) < 2**32:
                raise ValueError(f"{name}={getattr(self, name)} does not fit 32 bits")
