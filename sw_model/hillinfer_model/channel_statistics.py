# SPDX-License-Identifier: Apache-2.0
"""Channel statistics: exponents and means that the key codes of a segment are relative to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ChannelStatistics:
    """Exponent c and mean M of every channel of one segment and layer (contract, section 3).

    Parameters
    ----------
    exponents
        c, int8 of shape (kv_heads, head_dim), -14..16.
    means
        M, int32 of shape (kv_heads, head_dim), signed 24 bit in units of 2^(c-14).
    """

    exponents: NDArray[np.int8]
    means: NDArray[np.int32]

    def __post_init__(self) -> None:
        """Refuse arrays of other types or of different shapes."""
        if self.exponents.dtype != np.int8 or self.means.dtype != np.int32:
            raise ValueError(
                f"channel statistics need int8 and int32, not {self.exponents.dtype} "
                f"and {self.means.dtype}"
            )
        if self.exponents.shape != self.means.shape or self.means.ndim != 2:
            raise ValueError(
                f"channel statistics need two equal shapes (kv_heads, head_dim), not "
                f"{self.exponents.shape} and {self.means.shape}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.exponents.nbytes + self.means.nbytes
