# SPDX-License-Identifier: Apache-2.0
"""A hot pool that finds its rows in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.library import native_library
from hillinfer.native.structures import Places
from hillinfer.policies.pool_policy import PoolPolicy
from hillinfer.pools.hot_pool import Attended, HotPool

if TYPE_CHECKING:
    from hillinfer.storage.sequence import Sequence

T = TypeVar("T")


class NativeHotPool(HotPool):
    """Finds the rows of a selection in one call, because every layer wants them at every step.

    Parameters
    ----------
    row_bytes, most_rows, policy
        As for `HotPool`.

    Raises
    ------
    NativeError
        The native library is missing.
    """

    def __init__(self, row_bytes: int, most_rows: int, policy: PoolPolicy) -> None:
        super().__init__(row_bytes, most_rows, policy)
        self._library = native_library()
        self._row_bytes = row_bytes
        # Memory of slots stays where it is, and asking numpy takes long.
        self._slots_address: int = self._slots.data.ctypes.data
        self._stamps_address: int = self._slots.last_selected.ctypes.data
        self._table_address: int = self._slot_of_row.ctypes.data

    def cover(self, rows: int) -> None:
        """Make room in the table for row numbers below `rows`."""
        super().cover(rows)
        self._table_address = self._slot_of_row.ctypes.data

    def locate(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64], step: int
    ) -> NDArray[np.uint64]:
        """Return where rows lie in memory; see `HotPool.locate`."""
        out = np.empty(len(positions), np.uint64)
        self._library.row_places(self.places(layer, sequence, positions, step), out)
        return out

    def find(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Return where rows lie in memory; see `HotPool.find`."""
        out = np.empty(len(positions), np.uint64)
        places = self.places(layer, sequence, positions, 0)
        places.stamps = None
        self._library.row_places(places, out)
        return out

    def attend(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        step: int,
        attend: Callable[[Places], Attended[T]],
    ) -> Attended[T]:
        """Find rows and attend to them at once; see `HotPool.attend`."""
        return attend(self.places(layer, sequence, positions, step))

    def places(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64], step: int
    ) -> Places:
        """Return what the library needs to find rows, while nothing of them changes.

        Parameters as in `HotPool.locate`.
        """
        wanted = np.ascontiguousarray(positions, np.int64)
        groups, groups_address = sequence.group_table()
        places = Places(
            wanted.ctypes.data,
            len(wanted),
            sequence.tail_start(layer),
            sequence.held_starts[layer],
            sequence.lengths[layer],
            sequence.tail_address(layer),
            groups_address,
            len(groups),
            self._table_address,
            len(self._slot_of_row),
            self._stamps_address,
            self._slots_address,
            self._row_bytes,
            step,
        )
        # Another thread may replace the groups.
        places.kept = wanted, groups
        return places
