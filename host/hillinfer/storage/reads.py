# SPDX-License-Identifier: Apache-2.0
"""Several reads of one file into one buffer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Reads:
    """Where bytes lie and where they go.

    Parameters
    ----------
    file_offsets, buffer_offsets, byte_counts
        int64, one entry per read; multiples of 4,096 where the file is read past the page cache.
    """

    file_offsets: NDArray[np.int64]
    buffer_offsets: NDArray[np.int64]
    byte_counts: NDArray[np.int64]

    @classmethod
    def in_pieces(cls, offset: int, byte_count: int, most: int) -> Reads:
        """Return one read, `byte_count` bytes at `offset`, cut into pieces of at most `most`."""
        starts = np.arange(0, byte_count, most)
        return cls(starts + offset, starts, np.minimum(byte_count - starts, most))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.file_offsets)

    def only(self, chosen: NDArray[np.int64]) -> Reads:
        """Return some of them, by int64 number."""
        return Reads(
            self.file_offsets[chosen], self.buffer_offsets[chosen], self.byte_counts[chosen]
        )
