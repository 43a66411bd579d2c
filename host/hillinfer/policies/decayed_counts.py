# SPDX-License-Identifier: Apache-2.0
"""Hits that fade."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.policies.pool_policy import MOST_HITS, PoolPolicy

# Of the shifts 1 to 4 the best over small and large pools; `make pools` measures this one.
_FADE_SHIFT = 2
# A token selected in every step comes to rest where a hit weighs as much as what fades: at the
# largest number that 2 bytes hold.
_HIT = np.uint16((MOST_HITS + 1) >> _FADE_SHIFT)
# With one hit more it is the largest number.
_MOST_BEFORE = np.uint16(MOST_HITS - _HIT)


class DecayedCounts(PoolPolicy):
    """Ranks rows by hits of which a quarter fades at every step, so that old ones are forgotten."""

    def tally(self, counts: NDArray[np.uint16], selected: NDArray[np.int64]) -> None:
        """Let all hits fade and add this step's; see `PoolPolicy`."""
        counts -= counts >> _FADE_SHIFT
        hits = counts[selected]
        np.minimum(hits, _MOST_BEFORE, out=hits)
        hits += _HIT
        counts[selected] = hits
