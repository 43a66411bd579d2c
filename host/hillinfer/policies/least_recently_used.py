# SPDX-License-Identifier: Apache-2.0
"""Demote what was not selected for longest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.policies.pool_policy import PoolPolicy


class LeastRecentlyUsed(PoolPolicy):
    """Keeps the rows that were selected last; consecutive steps share most of their sets."""

    def victims(self, last_used: NDArray[np.int32], count: int) -> NDArray[np.int64]:
        """Return the `count` slots with the smallest stamps, the lower slot first among equals."""
        return np.argsort(last_used, kind="stable")[:count]
