# SPDX-License-Identifier: Apache-2.0
"""The paper's pool policy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.policies.pool_policy import PIN, PoolPolicy
from hillinfer.policies.row_history import RowHistory


class PinnedCounts(PoolPolicy):
    """Pins the most recent α·N tokens and ranks the others by hits (HillInfer section 4.2, BKP).

    The paper starts from counts that prefill left; here these are the selected sets of the last
    prefill queries, the only ones a decode step resembles.
    """

    observed_queries = 16

    def worth(self, rows: RowHistory) -> NDArray[np.int64]:
        """Return hits, and a pin for the most recent α·N tokens."""
        pinned = rows.positions >= rows.lengths - np.ceil(rows.alpha * rows.lengths)
        worth: NDArray[np.int64] = rows.counts.astype(np.int64) + PIN * pinned
        return worth
