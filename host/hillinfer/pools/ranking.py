# SPDX-License-Identifier: Apache-2.0
"""The order in which rows deserve DRAM."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.policies.pool_policy import PIN, PoolPolicy
from hillinfer.policies.row_history import RowHistory
from hillinfer.pools.pool_moment import PoolMoment

# Rows of the same worth are told apart by so many steps, then by so many positions; with 33 bits
# of worth that fills an int64.
_STEPS = 1 << 10
_POSITIONS = 1 << 20
_KEPT = 2 * PIN


def rank(policy: PoolPolicy, rows: RowHistory, moment: PoolMoment) -> NDArray[np.int64]:
    """Return a key per row, int64 of shape (rows,): the larger, the sooner it stays hot.

    Kept tokens come first, then the policy's worth, then what was selected later, then what is
    newer.
    """
    recent = rows.lengths - moment.kept_recent
    kept = (rows.positions < moment.kept_sinks) | (rows.positions >= recent)
    worth = policy.worth(rows) + _KEPT * kept
    # A pool that must shrink ranks by the moment of its last promotion; hits may be later.
    age = np.clip(moment.step - rows.last_selected.astype(np.int64), 0, _STEPS - 1)
    newer = np.minimum(rows.positions, _POSITIONS - 1)
    keys: NDArray[np.int64] = (worth * _STEPS + (_STEPS - 1 - age)) * _POSITIONS + newer
    return keys
