# SPDX-License-Identifier: Apache-2.0
"""Models the write port over time: bursts of output, and status beats after their responses."""

from __future__ import annotations

from collections import deque

from hillinfer_model.kernel_timing import STATUS_PATH, WAITING_BURSTS, WRITE_PATH
from hillinfer_model.key_stream import KeyStream
from hillinfer_model.latencies import Latencies
from hillinfer_model.memory_model import MemoryModel


class WriteStream:
    """Follows the write port's bursts in order (see `cycle_model`).

    Parameters
    ----------
    memory, latencies
        How the memory behaves.
    keys
        The port that a shared bus takes cycles from.
    """

    def __init__(self, memory: MemoryModel, latencies: Latencies, keys: KeyStream) -> None:
        self._memory = memory
        self._latencies = latencies
        self._keys = keys
        self._sent = 0.0
        self._response = 0.0
        self._answers: deque[float] = deque(maxlen=memory.outstanding)
        self._starts: deque[float] = deque(maxlen=WAITING_BURSTS)
        self._collected = 0
        self.beats = 0

    def burst(self, closed: float, beats: int) -> None:
        """Send one burst that is complete at a time."""
        start = max(closed + WRITE_PATH, self._sent)
        if len(self._answers) == self._answers.maxlen:
            start = max(start, self._answers[0])
        self._sent = self._memory.beats_end(start, beats)
        self._starts.append(start)
        self._response = max(self._response, self._sent + self._latencies.write())
        self._answers.append(self._response)
        self._keys.steal(beats + self._turn())
        self.beats += beats

    def room(self, depth: int) -> float:
        """Return until when computing waits because too many bursts wait for the bus.

        What is computed now is a burst only `depth` cycles later.
        """
        full = len(self._starts) == self._starts.maxlen
        return self._starts[0] - depth if full else 0.0

    def end_segment(self) -> None:
        """Send the last status beat of a segment once its scores are answered."""
        self._status(self._response)

    def empty_segment(self, known: float) -> None:
        """Send the status beat of a segment without tokens after all that was written before."""
        self._status(max(self._response, known))

    def finish(self, started: float) -> float:
        """Return when everything is answered."""
        return max(self._response, started)

    def _status(self, due: float) -> None:
        # Scores of the next segment overtake it: only its response counts for the end.
        sent = self._memory.beats_end(due + STATUS_PATH, 1)
        self._response = max(self._response, sent + self._latencies.write())
        self._keys.steal(1 + self._turn())
        self.beats += 1

    def _turn(self) -> int:
        """Return the cycles that the bus loses before this burst: none but for every so manieth."""
        cycles, bursts = self._memory.turnaround
        self._collected += 1
        if self._collected < bursts or not cycles:
            return 0
        self._collected = 0
        return cycles
