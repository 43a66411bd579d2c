# SPDX-License-Identifier: Apache-2.0
"""Keep the newest tokens, for comparison."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.policies.pool_policy import PoolPolicy
from hillinfer.policies.row_history import RowHistory


class MostRecent(PoolPolicy):
    """Keeps the newest tokens and learns nothing from what is selected."""

    def worth(self, rows: RowHistory) -> NDArray[np.int64]:
        """Return positions."""
        return rows.positions.astype(np.int64)
