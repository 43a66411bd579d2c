# SPDX-License-Identifier: Apache-2.0
"""A hot pool that finds and promotes its rows in numpy, as the native library does."""

import numpy as np

from hillinfer.kv.hot_pool import NOWHERE, HotPool, rank
from hillinfer.kv.pool_policies import RowHistory
from hillinfer.native.structures import row_addresses


class NumpyHotPool(HotPool):
    """What tests compare the native look-up with."""

    def find(self, layer, sequence, positions):
        """Return where rows lie in memory; see `HotPool.find`."""
        return self._by_numpy(layer, sequence, positions)[0]

    def locate(self, layer, sequence, positions, step):
        """Return where rows lie in memory, and stamp them; see `HotPool.locate`."""
        addresses, hot = self._by_numpy(layer, sequence, positions)
        self.columns.last_selected[hot] = step
        return addresses

    def promote(self, candidates, moment, settled_before):
        """Promote candidates; see `HotPool.promote`."""
        slots = self.columns
        used = slice(0, self.used_rows)
        cold = np.flatnonzero(self.slot_of_row[candidates.rows] == NOWHERE)
        alike = [np.full(len(cold), one, np.int32) for one in (moment.step, moment.length)]
        offered = (candidates.positions[cold], candidates.counts[cold], *alike)
        keys = rank(self.policy, RowHistory(*offered, moment.alpha), moment)
        best = np.argsort(keys)[::-1]
        into = np.flatnonzero(slots.rows[used] == NOWHERE)[: len(best)]
        at_rest = np.flatnonzero(
            (slots.rows[used] != NOWHERE) & (slots.last_selected[used] < settled_before)
        )
        columns = (slots.positions, slots.counts, slots.last_selected, slots.lengths)
        own = rank(
            self.policy, RowHistory(*(one[at_rest] for one in columns), moment.alpha), moment
        )
        others = keys[best[len(into) :]]
        worst = np.argsort(own)[: len(others)]
        demoted = at_rest[worst[own[worst] < others[: len(worst)]]]
        self.slot_of_row[slots.rows[demoted]] = NOWHERE
        into = np.concatenate([into, demoted])
        chosen = cold[best[: len(into)]]
        slots.data[into] = candidates.source[candidates.places[chosen]]
        slots.rows[into] = candidates.rows[chosen]
        slots.positions[into] = candidates.positions[chosen]
        slots.counts[into] = candidates.counts[chosen]
        slots.last_selected[into] = moment.step
        slots.lengths[into] = moment.length
        self.slot_of_row[candidates.rows[chosen]] = into
        return len(into), len(demoted)

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
