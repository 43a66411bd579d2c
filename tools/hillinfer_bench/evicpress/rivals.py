# SPDX-License-Identifier: Apache-2.0
"""The table of rivals: policies, the forms they may choose, and how they count uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hillinfer.placement.options import FadingUses, TotalUses, Uses
from hillinfer.placement.policies import (
    LeastDrop,
    LeastRecentlyUsed,
    MergedHulls,
    PlacementPolicy,
)

CODES = ("int8", "mixed5", "mixed4", "int4", "int2")
DROPPED = tuple(
    f"{dropper}-{kept:g}" for dropper in ("knorm", "keydiff", "snapkv") for kept in (0.75, 0.5, 0.2)
)
# Seconds. In an hour's trace documents are asked for in bursts: five minutes serve better than an
# hour in draws 1 to 3 of it, and 0 is what is reported.
_HALF_LIFE = 300.0
USUAL = ("held", "mixed4", "int8", "int4")
"""What `hillinfer documents put` measures of a long document where nobody names forms."""


@dataclass(frozen=True)
class Rival:
    """A way to manage documents.

    Parameters
    ----------
    name
        What tables call it.
    forms
        Names of the forms that it may choose beside resting.
    policy
        Makes its policy; None where nothing is chosen as requests come.
    uses
        Makes what counts uses.
    rest
        What documents rest as, `rows` or `text`.
    alpha
        Seconds that quality 1 is worth.
    knows_uses
        Whether it is told how often each document will be used, and places all of them exactly,
        once. No policy can know that.
    is_usual
        Whether it knows of forms what the usual profile says, which costs half of a prefill.
    uses_drive
        Whether forms may lie packed on the drive, too.
    important
        Share of a document's tokens that IMPRESS loads for a question; 0 where it is not that.
    is_served
        Whether the documents are a server's, with the engine's own forms beside.
    """

    name: str
    forms: tuple[str, ...] = ()
    policy: Callable[[], PlacementPolicy] | None = None
    uses: Callable[[], Uses] = FadingUses
    rest: str = "rows"
    alpha: float = 1.0
    knows_uses: bool = False
    is_usual: bool = False
    uses_drive: bool = False
    important: float = 0.0
    is_served: bool = False


def recent_uses() -> Uses:
    """Return what counts uses of late most."""
    return FadingUses(_HALF_LIFE)


SERVED = Rival("ours served", USUAL, is_usual=True, is_served=True)
"""A server's documents at its own α; it is played beside LRU alone, with a model attached."""


def lru(form: str) -> Rival:
    """Return LRU that keeps one form of each document."""
    return Rival(f"{form} + LRU", (form,), lambda: LeastRecentlyUsed(form))


def rivals(alphas: tuple[float, ...]) -> list[Rival]:
    """Return all that is compared, the policies that have an α once for each."""
    fixed = [
        Rival("recompute", rest="text"),
        lru("held"),
        lru("int8"),
        lru("int4"),
        *(lru(name) for name in DROPPED if name.endswith("-0.5")),
        *(Rival(f"IMPRESS-like, {share:g}", important=share) for share in (0.25, 0.5)),
    ]
    swept = []
    for alpha in alphas:
        mark = f", α {alpha:g}"
        paper = ("held", *DROPPED)
        every = ("held", *CODES, *DROPPED)
        swept += [
            Rival(f"paper{mark}", paper, LeastDrop, TotalUses, alpha=alpha, uses_drive=True),
            Rival(
                f"ours, paper's forms{mark}",
                paper,
                MergedHulls,
                recent_uses,
                alpha=alpha,
                uses_drive=True,
            ),
            Rival(
                f"ours{mark}",
                USUAL,
                MergedHulls,
                recent_uses,
                alpha=alpha,
                is_usual=True,
                uses_drive=True,
            ),
            Rival(
                f"optimum{mark}",
                every,
                None,
                TotalUses,
                alpha=alpha,
                knows_uses=True,
                uses_drive=True,
            ),
        ]
    return [*fixed, *swept]
