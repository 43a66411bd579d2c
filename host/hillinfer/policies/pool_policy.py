# SPDX-License-Identifier: Apache-2.0
"""Which rows are worth their place in DRAM."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.policies.row_history import RowHistory

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
