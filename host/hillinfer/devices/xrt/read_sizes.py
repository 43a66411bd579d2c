# SPDX-License-Identifier: Apache-2.0
"""How many bytes a P2P read should have, from the rates of the reads that were made."""

from __future__ import annotations

BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
# Loads that each size is tried for, and the share of the best rate that is good enough: between
# sizes as fast as each other the smaller one leaves more reads to be in flight.
_TRIALS = 3
_ENOUGH = 0.95


class ReadSizes:
    """The rates of one drive and card by bytes per read, and the size they speak for.

    The first loads try all sizes in turn, so measuring reads nothing that was not wanted anyway.

    Parameters
    ----------
    load_bytes
        Size of each load; a block is never larger.
    """

    def __init__(self, load_bytes: int) -> None:
        self._blocks = [block for block in BLOCKS if block < load_bytes] + [load_bytes]
        self._blocks = self._blocks[: len(BLOCKS)]
        self._seconds: dict[int, list[float]] = {block: [] for block in self._blocks}
        self._load_bytes = load_bytes
        self._chosen: int | None = None

    @property
    def rates(self) -> dict[int, float]:
        """Best bytes per second of each size that was tried."""
        return {
            block: self._load_bytes / min(seconds)
            for block, seconds in self._seconds.items()
            if seconds
        }

    def block_bytes(self) -> int:
        """Return the size of the next load's reads."""
        if self._chosen is None:
            untried = min(self._blocks, key=lambda block: len(self._seconds[block]))
            if len(self._seconds[untried]) < _TRIALS:
                return untried
            enough = _ENOUGH * max(self.rates.values())
            self._chosen = min(block for block, rate in self.rates.items() if rate >= enough)
        return self._chosen

    def note(self, block_bytes: int, seconds: float) -> None:
        """Take down how long a load took."""
        if self._chosen is None:
            self._seconds[block_bytes].append(max(seconds, 1e-9))
