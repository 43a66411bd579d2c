# SPDX-License-Identifier: Apache-2.0
"""A hot pool that finds its rows in numpy, as the native library does."""

import numpy as np

from hillinfer.kv.hot_pool import HotPool
from hillinfer.native.structures import row_addresses


class NumpyHotPool(HotPool):
    """What tests compare the native look-up with."""

    def find(self, layer, sequence, positions):
        """Return where rows lie in memory; see `HotPool.find`."""
        return self._by_numpy(layer, sequence, positions)[0]

    def locate(self, layer, sequence, positions, step):
        """Return where rows lie in memory, and stamp them; see `HotPool.locate`."""
        addresses, hot = self._by_numpy(layer, sequence, positions)
        self.note_hits(hot, step)
        return addresses

    def _by_numpy(self, layer, sequence, positions):
        if len(positions) and not 0 <= positions[0] <= positions[-1] < sequence.lengths[layer]:
            raise IndexError(f"positions {positions[0]} to {positions[-1]}")
        settled = positions[: positions.searchsorted(sequence.tail_start(layer))]
        slots = self.slots(sequence.rows(settled))
        first = sequence.held_starts[layer]
        # A group that the newest token filled is still held.
        held = positions.searchsorted(first)
        hot = np.flatnonzero(slots[:held] >= 0)
        addresses = np.zeros(len(positions), np.uint64)
        addresses[hot] = self.addresses(slots[hot])
        addresses[held:] = row_addresses(sequence.tails[layer], positions[held:] - first)
        return addresses, slots[slots >= 0]
