# SPDX-License-Identifier: Apache-2.0
"""One line of the pools table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

DEMAND = "belady, demand"
PREFETCH = "belady, prefetch"
EQUAL, MISSES, SHARED = "equal", "misses", "shared"
ALL_TEXTS = "all"


@dataclass(frozen=True)
class PoolRow:
    """How one policy did on one trace with one pool size.

    Parameters
    ----------
    policy
        Name in the table of pool policies, or one of Belady's bounds.
    pool_alphas
        Rows in DRAM per layer, half a group of them for the open group, over α·N.
    alpha, rule, shadow, text
        Of the trace; `ALL_TEXTS` for a mean over texts.
    sizes
        `equal` or `misses` as the setting; `shared` where a bound divides the same total among
        layers as it likes.
    pool_rows
        Slots of a layer's hot pool, the mean over layers.
    hit_rate
        Selected tokens, kept ones included, found in the hot pool or in the open group.
    settled_hit_rate
        The same without the open group.
    worst_layer_hit_rate
        `hit_rate` of the layer where it is lowest.
    promoted_rows, demoted_rows
        Of all layers and steps; None for a bound.
    """

    policy: str
    pool_alphas: float
    alpha: float
    rule: str
    shadow: str
    text: str
    sizes: str
    pool_rows: int
    hit_rate: float
    settled_hit_rate: float
    worst_layer_hit_rate: float
    promoted_rows: int | None = None
    demoted_rows: int | None = None

    @property
    def key(self) -> tuple[str, str, float, float, str, str]:
        """Return what tells rows of the same text apart."""
        return self.rule, self.shadow, self.alpha, self.pool_alphas, self.policy, self.sizes


def means(rows: Iterable[PoolRow]) -> list[PoolRow]:
    """Return the mean over texts of each policy, pool size and kind of trace, in first order."""
    groups: dict[tuple[str, str, float, float, str, str], list[PoolRow]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    return [
        replace(
            own[0],
            text=ALL_TEXTS,
            hit_rate=fmean(row.hit_rate for row in own),
            settled_hit_rate=fmean(row.settled_hit_rate for row in own),
            worst_layer_hit_rate=min(row.worst_layer_hit_rate for row in own),
            promoted_rows=_mean_count([row.promoted_rows for row in own]),
            demoted_rows=_mean_count([row.demoted_rows for row in own]),
        )
        for own in groups.values()
    ]


def _mean_count(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return round(fmean(known)) if known else None
