# SPDX-License-Identifier: Apache-2.0
"""Which hot rows are demoted when cold ones are promoted."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray


class PoolPolicy(ABC):
    """Ranks hot rows; subclasses override one method (HillInfer section 4.2, BKP)."""

    @abstractmethod
    def victims(self, last_used: NDArray[np.int32], count: int) -> NDArray[np.int64]:
        """Choose slots to demote.

        Parameters
        ----------
        last_used
            int32 of shape (slots,): the step each slot's row was last selected or written in.
        count
            How many to choose, at most the number of slots.

        Returns
        -------
        int64 of shape (count,): slots, each once.
        """
