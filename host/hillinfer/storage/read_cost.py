# SPDX-License-Identifier: Apache-2.0
"""What some rows took to read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadCost:
    """Calls to the drive, and the bytes they brought.

    Parameters
    ----------
    reads, byte_count
        How many.
    """

    reads: int = 0
    byte_count: int = 0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(self.reads + other.reads, self.byte_count + other.byte_count)
