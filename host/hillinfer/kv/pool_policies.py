# SPDX-License-Identifier: Apache-2.0
"""Pool policies, a small class each with one method, and how layers share the memory for hot rows.

A policy says which rows are worth their place in DRAM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import SettingsError
from hillinfer.settings import PoolSizes

# --- What a pool policy knows of rows ---


@dataclass(frozen=True)
class RowHistory:
    """Some rows of one layer and how they were used; all arrays have the shape (rows,).

    Parameters
    ----------
    positions
        int32, logical positions of the tokens.
    counts
        uint16, the hit-rate table's entries.
    last_selected
        int32, the step each row was last selected or written in.
    lengths
        int32, context length N of the sequence each row belongs to, at its last step; of a row
        that several sequences share, that of the one that went on last.
    """

    positions: NDArray[np.int32]
    counts: NDArray[np.uint16]
    last_selected: NDArray[np.int32]
    lengths: NDArray[np.int32]
    alpha: float


# --- Which rows are worth their place in DRAM ---

PIN = 1 << 31
MOST_HITS = np.iinfo(np.uint16).max


class PoolPolicy:
    """Counts how often each token was selected and ranks rows by it.

    Subclasses override one of its methods. Kept tokens are no matter of a policy: they stay hot
    whatever it says, as far as the pool goes.
    """

    observed_queries: int = 0
    """Last prefill queries whose selected sets count as first hits; 0 for none."""

    fade_shift: int = 0
    """How fast hits fade: at every step by themselves shifted down so far; 0 where none does."""

    takes_seen: bool = True
    """Whether rows that a dense pass looked at become hot where there is room, too."""

    def tally(self, counts: NDArray[np.uint16], selected: NDArray[np.int64]) -> None:
        """Bring one layer's hit-rate table up to date after a step, in place.

        Parameters
        ----------
        counts
            uint16 of shape (N,): 2 bytes per token, which saturate (HillInfer section 5.4).
        selected
            int64 positions, each once.
        """
        if self.fade_shift:
            counts -= counts >> self.fade_shift
        # A token selected in every step comes to rest where a hit weighs as much as what fades: at
        # the largest number that 2 bytes hold.
        hit = np.uint16((MOST_HITS + 1) >> self.fade_shift if self.fade_shift else 1)
        hits = counts[selected]
        np.minimum(hits, np.uint16(MOST_HITS - hit), out=hits)
        hits += hit
        counts[selected] = hits

    def worth(self, rows: RowHistory) -> NDArray[np.int64]:
        """Return what each row is worth, int64 of shape (rows,), from 0 to less than 2 · PIN.

        A cold row is promoted in place of a hot one that is worth less; among equals what was
        selected later is worth more. A row worth PIN or more is pinned: it is not demoted as long
        as the pool has room for all that are.
        """
        return rows.counts.astype(np.int64)


# --- The paper's pool policy ---


class PinnedCounts(PoolPolicy):
    """Pins the most recent α·N tokens and ranks the others by hits (HillInfer section 4.2, BKP).

    The paper starts from counts that prefill left; here these are the selected sets of the last
    prefill queries, the only ones a decode step resembles.
    """

    observed_queries = 16
    # The paper's pools are of rows that were selected.
    takes_seen = False

    def worth(self, rows: RowHistory) -> NDArray[np.int64]:
        """Return hits, and a pin for the most recent α·N tokens."""
        pinned = rows.positions >= rows.lengths - np.ceil(rows.alpha * rows.lengths)
        worth: NDArray[np.int64] = rows.counts.astype(np.int64) + PIN * pinned
        return worth


# --- Keep what was selected last ---


class LeastRecentlyUsed(PoolPolicy):
    """Demotes what was not selected for longest; consecutive steps share most of their sets."""

    def worth(self, rows: RowHistory) -> NDArray[np.int64]:
        """Return the step each row was last selected or written in."""
        return rows.last_selected.astype(np.int64)


# --- Hits that fade ---


class DecayedCounts(PoolPolicy):
    """Ranks rows by hits of which a quarter fades at every step, so that old ones are forgotten."""

    # Of 1 to 4 the best over small and large pools; `make pools` measures this one.
    fade_shift = 2


# --- Keep the newest tokens, for comparison ---


class MostRecent(PoolPolicy):
    """Keeps the newest tokens and learns nothing from what is selected."""

    def worth(self, rows: RowHistory) -> NDArray[np.int64]:
        """Return positions."""
        return rows.positions.astype(np.int64)


# --- The table of pool policies: which class for which `--pool-policy` ---

POOL_POLICIES: Mapping[str, type[PoolPolicy]] = MappingProxyType(
    {
        "decayed": DecayedCounts,
        "lru": LeastRecentlyUsed,
        "paper": PinnedCounts,
        "counts": PoolPolicy,
        "recent": MostRecent,
    }
)

# --- What the native library ranks by itself ---

RANKED_BY_PYTHON = -1
# As in host/native/promotion.h.
_NATIVE_WORTH: Mapping[Callable[..., object], int] = MappingProxyType(
    {
        PoolPolicy.worth: 0,
        LeastRecentlyUsed.worth: 1,
        PinnedCounts.worth: 2,
        MostRecent.worth: 3,
    }
)


def native_worth(policy: PoolPolicy) -> int:
    """Return the native library's number for what a policy calls worth.

    Any policy whose `worth` is its own, or an instance's, is ranked by Python.
    """
    return _NATIVE_WORTH.get(getattr(policy.worth, "__func__", len), RANKED_BY_PYTHON)


def make_pool_policy(name: str) -> PoolPolicy:
    """Return the policy of a name, or raise SettingsError naming those there are."""
    if name not in POOL_POLICIES:
        raise SettingsError(
            f"pool_policy={name!r} is unknown: choose one of {', '.join(POOL_POLICIES)}"
        )
    return POOL_POLICIES[name]()


# --- How the memory for hot rows is divided among layers ---


class LayerShares:
    """The share of each layer, equal at first."""

    # Half of the memory is divided equally, so that no layer starves while it happens to hit.
    _EQUAL_PART = 0.5
    _MOST = 3.0
    # How much of what was known before still counts.
    _MEMORY = 0.5

    def __init__(self, layers: int, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self._misses = np.zeros(layers)
        self._shares = np.full(layers, 1 / layers)

    @property
    def largest(self) -> float:
        """The largest share there can be, as a multiple of an equal one."""
        return self._MOST if self.sizes is PoolSizes.MISSES else 1.0

    def share(self, layer: int) -> float:
        """Return a layer's share of all slots, 1 in all."""
        return float(self._shares[layer])

    def note_misses(self, misses: NDArray[np.int64]) -> None:
        """Learn how many cold rows each layer wanted since the last time, int64 (layers,)."""
        if self.sizes is PoolSizes.EQUAL:
            return
        self._misses = self._MEMORY * self._misses + misses
        total = float(self._misses.sum())
        layers = len(self._misses)
        by_misses = self._misses / total if total else np.full(layers, 1 / layers)
        shares = self._EQUAL_PART / layers + (1 - self._EQUAL_PART) * by_misses
        most = min(self._MOST / layers, 1.0)
        shares = np.minimum(shares, most)
        # What was cut off goes to the others, as far as each is from the most.
        room = most - shares
        left = 1 - float(shares.sum())
        self._shares = shares + room * (left / float(room.sum()) if left > 0 else 0)
