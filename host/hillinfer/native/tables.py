# SPDX-License-Identifier: Apache-2.0
"""Tables of sequences and hot pools, which the native library owns and calls change."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.library import NativeLibrary, native_library
from hillinfer.native.structures import LayerTable, PoolTable, Promotion
from hillinfer_model.kernel_spec import GROUP_TOKENS

# --- Memory of the library's, looked at from Python ---


class Handle:
    """An object of the library's, which is freed when nobody looks at its memory any more.

    `address` is the object's, and `free` the library's function that frees it.
    """

    def __init__(self, address: int, free: Any) -> None:
        self.address = address
        # Where the process ends the system frees all of it; threads may still look at it then.
        weakref.finalize(self, free, address).atexit = False

    def view(self, address: int | None, count: int, item: np.dtype[Any]) -> NDArray[Any]:
        """Return items of the object's memory, a flat array that keeps the object alive."""
        return _view(self, address, count, item)


def _view(owner: object, address: int | None, count: int, item: np.dtype[Any]) -> NDArray[Any]:
    """Return items that lie in memory, a flat array that keeps an object alive."""
    if not count or address is None:
        return np.zeros(0, item)
    memory: Any = (ctypes.c_uint8 * (count * item.itemsize)).from_address(address)
    memory.owner = owner
    array: NDArray[Any] = np.frombuffer(memory, item)
    return array


class _Pages:
    """What all arrays over the same memory keep alive: that memory's owner."""

    def __init__(self, owner: Handle) -> None:
        self.owner = owner


class Column:
    """An array of the library's that becomes longer where it lies, or elsewhere when it has to.

    It belongs to `handle`, and `item` is what an entry is; `array` are the entries, where they lie
    until they move.
    """

    def __init__(self, handle: Handle, item: np.dtype[Any]) -> None:
        self._handle = handle
        self._item = item
        self._pages = _Pages(handle)
        self.array: NDArray[Any] = np.zeros(0, item)

    def grow(self, name: str, *arguments: int) -> None:
        """Call what makes room for more; `look` must follow."""
        library, before = native_library(), ctypes.c_void_p()
        library.call_holding(name, self._handle.address, *arguments, ctypes.byref(before))
        if before.value is not None:
            # Other threads may look at it until they have arrays over what it is now.
            self._pages.owner = Handle(before.value, library.closing("hillinfer_pages_close"))
            self._pages = _Pages(self._handle)

    def look(self, address: int | None, count: int) -> None:
        """Look at the entries where they lie now."""
        self.array = _view(self._pages, address, count, self._item)


_WORD = np.dtype(np.int64)
_WORDS = ctypes.sizeof(LayerTable) // _WORD.itemsize


def _word(name: str) -> int:
    return int(getattr(LayerTable, name).offset) // _WORD.itemsize


_LENGTH, _HELD, _CODED = map(_word, ("length", "held", "coded"))

# --- Sequences ---

HIT_BYTES = 2
GROWTH_TOKENS = 1024


class HitRateTable:
    """2 bytes per token and layer of one sequence: how often it was selected (HillInfer 5.4).

    What they mean is the pool policy's matter; none lets them overflow. They belong to `handle`,
    and `tables` are those of its layers. `counts` are uint16 of each layer, where they lie; others
    once `cover` has made room for more.
    """

    def __init__(self, handle: Handle, tables: list[LayerTable]) -> None:
        self._tables = tables
        self._columns = [Column(handle, np.dtype(np.uint16)) for _ in tables]
        self.counts = [self._look(layer) for layer in range(len(tables))]

    @property
    def byte_count(self) -> int:
        """Memory of the table."""
        return sum(counts.nbytes for counts in self.counts)

    def growth_bytes(self, layer: int, tokens: int) -> int:
        """Return by how much `cover` would grow the table."""
        return max(0, room_for(tokens) - len(self.counts[layer])) * HIT_BYTES

    def cover(self, layer: int, tokens: int) -> None:
        """Make room for a layer's positions below `tokens`, with no hits yet."""
        if tokens > len(self.counts[layer]):
            self._columns[layer].grow("hillinfer_sequence_cover_hits", layer, room_for(tokens))
            self.counts[layer] = self._look(layer)

    def _look(self, layer: int) -> NDArray[np.uint16]:
        column, table = self._columns[layer], self._tables[layer]
        column.look(table.hits, table.hit_count)
        return column.array


def room_for(tokens: int) -> int:
    """Return the entries that a layer's table has for so many tokens."""
    return -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS


class SequenceTables:
    """The tables of one sequence: groups, lengths, tails, hit counts and shadow descriptors.

    They begin as a copy of those of `source`, without descriptors, empty where None. Raises
    MemoryError where there is none for the tails.

    `addresses` say where each layer's table lies, as decode steps in the library are told.
    `lengths`, `held_starts` and `coded` are of each layer its tokens, the position of the first row
    in its tail, and the coded tokens of the last segment that is described; to be looked at.
    `tails` is uint8 (layers, 64, row_bytes), where it stays, and `hits` the hit counts.
    """

    def __init__(self, layers: int, row_bytes: int, source: SequenceTables | None = None) -> None:
        self._library: NativeLibrary = native_library()
        self._layers, self._row_bytes = layers, row_bytes
        if source is None:
            address = self._library.make("hillinfer_sequence_open", layers, row_bytes)
        else:
            address = self._library.make("hillinfer_sequence_fork", source.handle.address)
        self.handle: Handle = Handle(address, self._library.closing("hillinfer_sequence_close"))
        self._address = address
        first = self._library.sequence_layers(address)
        size = ctypes.sizeof(LayerTable)
        self.addresses = [first + layer * size for layer in range(layers)]
        self._tables = [LayerTable.from_address(one) for one in self.addresses]
        words = self.handle.view(first, layers * _WORDS, _WORD).reshape(layers, _WORDS)
        words.flags.writeable = False
        self.lengths = words[:, _LENGTH].data
        self.held_starts = words[:, _HELD].data
        self.coded = words[:, _CODED].data
        tail = GROUP_TOKENS * row_bytes
        tails = self.handle.view(self._tables[0].tail, layers * tail, np.dtype(np.uint8))
        self.tails: NDArray[np.uint8] = tails.reshape(layers, GROUP_TOKENS, row_bytes)
        self.hits = HitRateTable(self.handle, self._tables)

    def fork(self) -> SequenceTables:
        """Return tables that have the same and go on by themselves."""
        return SequenceTables(self._layers, self._row_bytes, self)

    def groups(self) -> NDArray[np.int64]:
        """Return the numbers of all groups, int64; what comes later is not in it."""
        table = self._tables[0]
        groups = self.handle.view(table.groups, table.group_count, _WORD)
        groups.flags.writeable = False
        return groups

    def append_groups(self, numbers: NDArray[np.int64]) -> None:
        """Let the next positions lie in these groups, int64, contiguous."""
        self._library.call_holding(
            "hillinfer_sequence_append_groups", self._address, numbers.ctypes.data, len(numbers)
        )

    def set_length(self, layer: int, length: int, held: int) -> None:
        """Say how many tokens a layer has, and which position its tail begins with."""
        self._library.tables.hillinfer_sequence_set_length(self._address, layer, length, held)

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on, with the groups and hits behind it."""
        self._library.tables.hillinfer_sequence_truncate(self._address, length)

    def describe(self, layer: int, words: Any, count: int) -> None:
        """Describe the shadow of a layer, `SEGMENT_WORDS` words for each of its segments."""
        self._library.call_holding(
            "hillinfer_sequence_describe", self._address, layer, words.buffer_info()[0], count
        )

    def note_coded(self, layer: int, tokens: int) -> None:
        """Say how many tokens of the last segment are coded, where somebody else coded them."""
        self._library.tables.hillinfer_sequence_note_coded(self._address, layer, tokens)


# --- Pools ---

# Of a promotion that nobody waits for: no slot is as late as that.
_NEVER = np.iinfo(np.int32).max


class PoolTables:
    """The slots of one layer's hot pool, with their memory.

    Memory is taken as slots are used, and given back as the pool shrinks; address space is reserved
    for `slots`. Raises OSError where the system does not reserve so much.

    `address` is what calls of the library are told, and `table` what lies there, as long as this is
    kept. `data` are the rows themselves, uint8 of shape (slots, row_bytes), and `rows` their
    numbers, int64, -1 where a slot is free. `positions`, `last_selected` and `lengths`, int32, and
    `counts`, uint16, are what `RowHistory` holds.
    """

    def __init__(self, slots: int, row_bytes: int) -> None:
        self._library = native_library()
        self.address = self._library.open_pool(slots, row_bytes)
        self._handle = Handle(self.address, self._library.closing("hillinfer_pool_close"))
        self.table = table = PoolTable.from_address(self.address)
        view = self._handle.view
        data = view(table.data, slots * row_bytes, np.dtype(np.uint8))
        self.data: NDArray[np.uint8] = data.reshape(slots, row_bytes)
        self.rows: NDArray[np.int64] = view(table.rows, slots, _WORD)
        int32 = np.dtype(np.int32)
        self.positions: NDArray[np.int32] = view(table.positions, slots, int32)
        self.last_selected: NDArray[np.int32] = view(table.last_selected, slots, int32)
        self.lengths: NDArray[np.int32] = view(table.lengths, slots, int32)
        self.counts: NDArray[np.uint16] = view(table.counts, slots, np.dtype(np.uint16))
        self._slot_of_row = Column(self._handle, int32)

    @property
    def slot_of_row(self) -> NDArray[np.int32]:
        """The slot of each row number that is covered, int32, -1 where it is not hot.

        Another array once more are covered.
        """
        return self._slot_of_row.array

    @property
    def used(self) -> int:
        """Slots that memory is taken for."""
        return int(self.table.used)

    @property
    def free(self) -> int:
        """Slots of those that no row is in."""
        return int(self._library.tables.hillinfer_pool_free_slots(self.address))

    def cover(self, rows: int) -> None:
        """Make room in the table for row numbers below `rows`."""
        self._slot_of_row.grow("hillinfer_pool_cover", rows)
        self._slot_of_row.look(self.table.slot_of_row, self.table.row_count)

    def grow(self, slots: int) -> None:
        """Take more slots, free at first."""
        self._library.tables.hillinfer_pool_grow(self.address, slots)

    def forget(self, first: int, last: int) -> None:
        """Drop rows of first <= row < last."""
        self._library.tables.hillinfer_pool_forget(self.address, first, last)

    def refresh(self, sequence: int, settled: int, length: int, fades: int, shift: int) -> None:
        """Learn what a sequence's hits are now; `sequence` is the address of a layer's table.

        They have faded so often since, each time by themselves shifted down so far.
        """
        learn = self._library.tables.hillinfer_pool_refresh
        learn(self.address, sequence, settled, length, fades, shift)

    def shrink(self, capacity: int, moment: Promotion) -> int:
        """Demote all but the best rows, give the rest back, and say how many were demoted.

        `capacity` slots stay; `moment` says how rows rank. Raises MemoryError where there is none
        to rank them in.
        """
        moment.settled_before = _NEVER
        demoted: int = self._library.functions.hillinfer_pool_shrink(self.address, capacity, moment)
        if demoted < 0:
            raise MemoryError("the pool found no memory to rank its rows in")
        return demoted
