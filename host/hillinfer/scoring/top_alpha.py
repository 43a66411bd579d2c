# SPDX-License-Identifier: Apache-2.0
"""The best tokens of score blocks, whatever order those come in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hillinfer.scoring.scorer import SegmentShadow, Wanted, total_tokens
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.score_block import ScoreBlock
from hillinfer_model.selection import kept_positions


class TopAlpha:
    """Keeps the best tokens of all score blocks seen so far (HillInfer section 4.2, HIE).

    Ranking is (score code descending, position ascending), so the result does not depend on how
    scores were cut into blocks nor on the order the blocks came in.

    Parameters
    ----------
    count
        Tokens to select, the kept ones included.
    kept
        int64 positions that are selected whatever their score, ascending.
    """

    def __init__(self, count: int, kept: NDArray[np.int64]) -> None:
        self._kept = kept
        self._wanted = count - len(kept)
        self._best = np.empty(0, np.int64)
        self._waiting: list[NDArray[np.int64]] = []
        self._waiting_count = 0

    def merge(self, block: ScoreBlock) -> None:
        """Take one score block into account."""
        # One integer orders as (code descending, position ascending) when sorted descending.
        keys = (block.codes.astype(np.int64) << 40) + ((1 << 40) - 1 - block.positions)
        self._waiting.append(keys)
        self._waiting_count += len(keys)
        if self._waiting_count > max(2 * self._wanted, 4096):
            self._settle()

    def positions(self) -> NDArray[np.int64]:
        """Return the selected positions, int64, ascending, the kept ones among them."""
        self._settle()
        chosen = (1 << 40) - 1 - (self._best & ((1 << 40) - 1))
        return np.sort(np.concatenate([self._kept, chosen]))

    def _settle(self) -> None:
        keys = np.concatenate([self._best, *self._waiting])
        self._waiting, self._waiting_count = [], 0
        # Kept positions take part here so that they cannot push anything out: drop them first.
        positions = (1 << 40) - 1 - (keys & ((1 << 40) - 1))
        keys = keys[~np.isin(positions, self._kept)]
        if len(keys) > self._wanted:
            cut = len(keys) - self._wanted
            keys = np.partition(keys, cut)[cut:] if self._wanted else keys[:0]
        self._best = keys


def top_of_blocks(
    blocks: Iterable[ScoreBlock],
    spec: KernelSpec,
    scope: Scope,
    segments: Sequence[SegmentShadow],
    coming: int,
    wanted: Sequence[Wanted],
) -> list[list[NDArray[np.int64]]]:
    """Return the selected sets of a scorer that only scores; see `Scorer.choose_each`.

    Parameters
    ----------
    blocks
        All of `segments`, in any order.
    spec, scope
        Of the scorer.
    segments, coming, wanted
        As there, whose errors it raises.
    """
    length = total_tokens(segments) + coming
    sets = 1 if scope is Scope.LAYER else spec.kv_heads
    tops = []
    for one in wanted:
        one.check(length, coming)
        kept = kept_positions(length, one.sinks, one.recent)
        # One that is coming is among the newest, which are kept.
        kept = kept[: len(kept) - coming]
        tops.append([TopAlpha(one.count - coming, kept) for _ in range(sets)])
    for block in blocks:
        for own in tops:
            own[block.kv_head].merge(block)
    newest = np.arange(length - coming, length)
    return [[np.append(top.positions(), newest) for top in own] for own in tops]
