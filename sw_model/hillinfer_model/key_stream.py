# SPDX-License-Identifier: Apache-2.0
"""Models the key port over time: when bursts are requested, arrive and are computed."""

from __future__ import annotations

from collections import deque

from hillinfer_model.kernel_timing import KEY_FIFO_BEATS, READ_DATA
from hillinfer_model.latencies import Latencies
from hillinfer_model.memory_model import MemoryModel


class KeyStream:
    """Follows the key port's bursts in order (see `cycle_model`).

    Parameters
    ----------
    memory, latencies
        How the memory behaves.
    """

    def __init__(self, memory: MemoryModel, latencies: Latencies) -> None:
        self._memory = memory
        self._latencies = latencies
        self._asked = 0.0
        self._ready = 0.0
        self._arrived = 0.0
        self._stolen = 0.0
        self._gate = 0.0
        # Ends of the bursts that may still be open, and (beats so far, computed) of those whose
        # beats may still be in the FIFO.
        self._open: deque[float] = deque(maxlen=memory.outstanding)
        self._held: deque[tuple[int, float]] = deque([(0, 0.0)])
        self.computed = 0.0
        self.beats = 0

    def steal(self, beats: int) -> None:
        """Count beats of other ports, which delay the next key burst on a shared bus."""
        if self._memory.shared_bus:
            self._stolen += beats

    def open_segment(self, command: float, loaded: float) -> None:
        """Begin a segment whose key command and whose blocks are there at these times."""
        self._asked = max(self._asked, command)
        self._gate = loaded

    def burst(self, beats: int, not_before: float) -> float:
        """Read and compute one burst; return when its last beat is computed."""
        asked = max(self._asked, self._room(beats))
        if len(self._open) == self._open.maxlen:
            asked = max(asked, self._open[0])
        self._asked = asked + 1
        self._ready = max(self._ready, asked + self._latencies.read())
        # Beats of other ports pass while this port waits for memory, then in turn with its own.
        waited = max(self._ready - self._arrived, 0.0)
        passed = min(self._stolen, waited + beats)
        start = max(self._ready, self._arrived)
        self._arrived = self._memory.beats_end(start, beats + max(passed - waited, 0.0))
        self._stolen -= passed
        self._open.append(self._arrived)
        self.beats += beats
        free = max(self.computed, self._gate, not_before)
        self.computed = max(free + beats, self._arrived + READ_DATA)
        self._held.append((self.beats, self.computed))
        return self.computed

    def _room(self, beats: int) -> float:
        """Return when the FIFO has room for a burst: when an earlier beat is computed."""
        needed = self.beats + beats - KEY_FIFO_BEATS
        if needed <= 0:
            return 0.0
        while self._held[0][0] < needed:
            self._held.popleft()
        count, end = self._held[0]
        # Within a burst the beats are computed one after the other.
        return end - (count - needed)
