# SPDX-License-Identifier: Apache-2.0
"""Latencies drawn evenly from a memory's range, the same ones for every run."""

from __future__ import annotations

from hillinfer_model.memory_model import MemoryModel

_MASK = 2**64 - 1


class Latencies:
    """Draws read and write latencies of one launch.

    Parameters
    ----------
    memory
        Whose ranges they lie in.
    """

    def __init__(self, memory: MemoryModel) -> None:
        self._memory = memory
        # The generator and the first seed of the simulated memory in `hw/testbench`.
        self._state = 3

    def read(self) -> int:
        """Return the cycles from a read address to its first beat."""
        return self._draw(*self._memory.read_latency)

    def usual_read(self, bursts: int = 1) -> float:
        """Return the expected latency of the last of some bursts that are asked for together.

        Answers come in order, so it is the largest of as many latencies.
        """
        low, high = self._memory.read_latency
        return low + (high - low) * bursts / (bursts + 1)

    def write(self) -> int:
        """Return the cycles from a burst's last beat to its response."""
        return self._draw(*self._memory.write_latency)

    def _draw(self, low: int, high: int) -> int:
        state = self._state
        state ^= (state << 13) & _MASK
        state ^= state >> 7
        state ^= (state << 17) & _MASK
        self._state = state
        return low + (state >> 11) % (high - low + 1)
