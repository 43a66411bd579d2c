# SPDX-License-Identifier: Apache-2.0
"""Keep what was selected last."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.policies.pool_policy import PoolPolicy
from hillinfer.policies.row_history import RowHistory


class LeastRecentlyUsed(PoolPolicy):
    """Demotes what was not selected for longest; consecutive steps share most of their sets."""

    def worth(self, rows: RowHistory) -> NDArray[np.int64]:
        """Return the step each row was last selected or written in."""
        return rows.last_selected.astype(np.int64)
