# SPDX-License-Identifier: Apache-2.0
"""Value codes of single tokens in DRAM, for attention to coded tokens (contract, section 14)."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.errors import BudgetError
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.native.library import native_library
from hillinfer.native.signatures import CodeSlots
from hillinfer.native.structures import row_addresses
from hillinfer.scoring.coded import NativeValueCoder
from hillinfer.system.growing_tables import GrowingTable
from hillinfer.system.kept_memory import FreedHeap
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.value_layout import code_row_bytes

# --- A segment's value statistics ---


@dataclass(frozen=True)
class SegmentValues:
    """Statistics of a segment's values, and under which number codes of it are kept.

    Forks that share groups take statistics of their own where nobody had taken any. So a kept code
    is one of this segment only where it has its number, which no other statistics have. Copies of a
    segment have the same one.
    """

    statistics: ChannelStatistics
    number: int

    @cached_property
    def words(self) -> bytes:
        """What the library is told: every step asks, and numpy takes long to say addresses."""
        c, m = self.statistics.exponents, self.statistics.means
        return struct.pack("=3q", self.number, c.ctypes.data, m.ctypes.data)


# --- The codes of one layer ---

Rows = NDArray[np.int64]

CHUNK_SLOTS = 64
# A code row's token, and under which number it was coded.
_SLOT_TABLE_BYTES = 4 + 4
# A row's slot, and how often and how lately it was wanted.
ROW_TABLE_BYTES = 4 + 2
_HALF_LIFE_STEPS = 32
_LARGEST_WORTH = 2.0**8
# Sums of it stay below this, whatever number of sequences wants a token: older times fade.
MOST_WORTH = 2.0**15


def slot_bytes(spec: KernelSpec) -> int:
    """Return the bytes that a token's kept codes take in one layer, tables included."""
    return code_row_bytes(spec) + spec.kv_heads + _SLOT_TABLE_BYTES


@dataclass(frozen=True)
class Columns:
    """What is known of rows and slots.

    Parameters
    ----------
    slots, worth
        Of each row number its slot, int32, below 0 where nothing is kept, and what that is worth,
        float16.
    rows, numbers
        Of each slot its row, int32, below 0 where it is free, and the number of its codes, int32.
    chunks, bases
        64 slots each, uint8 (64, row_bytes), and where they lie, uint64.
    """

    slots: NDArray[np.int32]
    worth: NDArray[np.float16]
    rows: NDArray[np.int32]
    numbers: NDArray[np.int32]
    chunks: tuple[NDArray[np.uint8], ...]
    bases: NDArray[np.uint64]


class CodePool:
    """Codes of one layer's tokens by row number, as many as there is memory for.

    Which tokens stay follows how often they were wanted, older times counting less.

    Parameters
    ----------
    row_bytes
        Of a code row and its exponents.

    Attributes
    ----------
    changing
        Held by whoever changes these codes or looks at them, and wants nothing of others meanwhile.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes, self._step_worth = row_bytes, 1.0
        self._library, self.changing = native_library(), threading.RLock()
        self._table = CodeSlots(row_bytes=row_bytes, most_worth=MOST_WORTH)
        self._slots, self._worth = GrowingTable(np.int32, -1), GrowingTable(np.float16)
        self._rows, self._numbers = GrowingTable(np.int32, -1), GrowingTable(np.int32, -1)
        none, halves = np.zeros(0, np.int32), np.zeros(0, np.float16)
        self._seen = self._next = Columns(none, halves, none, none, (), np.zeros(0, np.uint64))
        self._describe()

    @property
    def address(self) -> int:
        """Where the library finds what is here, and changes it."""
        if self._seen is not self._next:
            with self.changing:
                self._describe()
        return ctypes.addressof(self._table)

    @property
    def columns(self) -> Columns:
        """What there is; the library is told first where an interrupt came before it was."""
        _ = self.address
        return self._next

    @property
    def capacity(self) -> int:
        """Slots that there are."""
        return len(self.columns.rows)

    @property
    def covered(self) -> int:
        """Row numbers that there are tables for."""
        return len(self.columns.slots)

    @property
    def used(self) -> int:
        """Slots that hold codes."""
        return int(np.count_nonzero(self.columns.rows >= 0))

    def begin_step(self) -> None:
        """Let what was wanted before count a little less."""
        self._step_worth *= 2 ** (1 / _HALF_LIFE_STEPS)
        if self._step_worth > _LARGEST_WORTH:
            own = self.columns.worth
            own /= np.float16(self._step_worth)
            self._step_worth = 1.0
        self._table.step_worth = np.float16(self._step_worth)

    def cover(self, rows: int) -> None:
        """Have tables for so many row numbers."""
        own = self.columns
        slots, worth = self._slots.grown(own.slots, rows), self._worth.grown(own.worth, rows)
        self._become(replace(own, slots=slots, worth=worth))

    def resize(self, capacity: int) -> None:
        """Have so many slots, a multiple of 64; what lies in those that go is forgotten."""
        own, more = self.columns, capacity - self.capacity
        if more < 0:
            gone = own.rows[capacity:]
            own.slots[gone[gone >= 0]] = -1
            chunks = own.chunks[: capacity // CHUNK_SLOTS]
            rows, numbers = own.rows[:capacity], own.numbers[:capacity]
        elif more:
            shape = CHUNK_SLOTS, self._row_bytes
            made = (np.zeros(shape, np.uint8) for _ in range(more // CHUNK_SLOTS))
            chunks, rows = (*own.chunks, *made), self._rows.grown(own.rows, capacity)
            numbers = self._numbers.grown(own.numbers, capacity)
        else:
            return
        bases = np.array([one.ctypes.data for one in chunks], np.uint64)
        self._become(replace(own, rows=rows, numbers=numbers, chunks=chunks, bases=bases))
        for table, before in (self._rows, own.rows), (self._numbers, own.numbers):
            table.cut(before, capacity)

    def _become(self, columns: Columns) -> None:
        # At once: an interrupt may come anywhere, and the library is never told of half of them.
        self._next = columns
        self._describe()

    def _describe(self) -> None:
        own = self._next
        table = CodeSlots(
            slot_of_row=own.slots.ctypes.data,
            worth=own.worth.ctypes.data,
            row_count=len(own.slots),
            numbers=own.numbers.ctypes.data,
            rows=own.rows.ctypes.data,
            slot_count=len(own.rows),
            chunks=own.bases.ctypes.data,
            row_bytes=self._row_bytes,
            step_worth=np.float16(self._step_worth),
            most_worth=MOST_WORTH,
        )
        size = ctypes.sizeof(table)
        ctypes.memmove(ctypes.addressof(self._table), ctypes.addressof(table), size)
        # What the library saw before may go.
        self._seen = own

    def want(self, rows: NDArray[np.int64]) -> None:
        """Note that tokens of these row numbers, each once, are wanted in this step."""
        own = np.ascontiguousarray(rows, np.int64)
        self._library.functions.hillinfer_want_codes(self.address, own.ctypes.data, len(own))

    def worth(self, rows: NDArray[np.int64]) -> NDArray[np.float16]:
        """Return what codes of these row numbers are worth: 1 for each time, halved by 32 steps."""
        worth = np.zeros(len(rows), np.float16)
        known = rows < len(self.columns.worth)
        worth[known] = self.columns.worth[rows[known]] / np.float16(self._step_worth)
        return worth

    def recall(self, rows: NDArray[np.int64], worth: NDArray[np.float16]) -> None:
        """Take codes of these row numbers to be worth at least so much, as `worth` returns it."""
        now = np.minimum(worth.astype(np.float32) * np.float32(self._step_worth), MOST_WORTH)
        self.columns.worth[rows] = np.maximum(self.columns.worth[rows], now.astype(np.float16))

    def find(
        self, rows: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], list[NDArray[np.uint8]]]:
        """Return where codes lie, uint64 and 0 where they are not kept, and what holds them.

        Parameters
        ----------
        rows
            Row numbers.
        numbers
            Of each, that of its segment's values.
        """
        addresses = np.zeros(len(rows), np.uint64)
        slots = self.columns.slots[rows]
        if len(self.columns.rows):
            held = np.flatnonzero((slots >= 0) & (self.columns.numbers[slots] == numbers))
            addresses[held] = self._places(slots[held])
        return addresses, list(self.columns.chunks)

    def offer(self, rows: Rows, numbers: Rows, codes: NDArray[np.uint8]) -> int:
        """Keep codes that are worth more than what gives way for them; return how many.

        Parameters
        ----------
        rows, numbers
            As for `find`; each row number once.
        codes
            uint8 of shape (tokens, at least row_bytes).
        """
        own, of = (np.ascontiguousarray(one, np.int64) for one in (rows, numbers))
        given, kept = np.ascontiguousarray(codes), ctypes.c_int64()
        places = row_addresses(given, np.arange(len(own)))
        told = (one.ctypes.data for one in (own, of, places))
        rest = len(own), ctypes.byref(kept)
        self._library.call("hillinfer_offer_codes", self.address, *told, *rest)
        return kept.value

    def forget(self, rows: NDArray[np.int64]) -> None:
        """Keep no codes of these row numbers, which are other tokens' from here on."""
        own = rows[rows < len(self.columns.slots)]
        slots = self.columns.slots[own]
        self.columns.rows[slots[slots >= 0]] = -1
        self.columns.slots[own] = -1
        self.columns.worth[own] = 0

    def _places(self, slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        within = (slots % CHUNK_SLOTS).astype(np.uint64) * np.uint64(self._row_bytes)
        return np.asarray(self.columns.bases[slots // CHUNK_SLOTS] + within)


# --- The codes of all layers ---

# Of what hot rows and codes share, codes take this part, or all that there are of them.
CODE_SHARE = 0.85


class ValueCodes:
    """Keeps value codes of tokens in DRAM, beside the hot rows and counted in M0.

    A coded value is a function of its row. So a token whose codes are not kept is coded when its
    row arrives, and nothing depends on what is kept but time.

    Parameters
    ----------
    spec
        Shape.
    layers
        Of the model.
    accountant
        Counts them.
    least_hot
        Returns the bytes that hot rows need at least.
    set_aside
        Called with the bytes that codes hold of what is counted as hot.

    Attributes
    ----------
    layers
        The pools.
    covered
        Row numbers that there are tables for: `cover` does nothing for as many.
    """

    def __init__(
        self,
        spec: KernelSpec,
        layers: int,
        accountant: Accountant,
        least_hot: Callable[[], int],
        set_aside: Callable[[int], None],
    ) -> None:
        self.spec = spec
        self.coder = NativeValueCoder(spec)
        self._accountant = accountant
        self._least_hot = least_hot
        self._set_aside = set_aside
        self._slot_bytes = slot_bytes(spec)
        self.layers = [CodePool(self.coder.row_bytes) for _ in range(layers)]
        self._capacity = self.covered = self._counted = 0
        # Whether the last change of what there is got through: an interrupt may have come.
        self._is_whole = True
        # The accountant's changes, and the least of hot rows, that the capacity was made for.
        self._fitted = -1, 0
        self._freed = FreedHeap()
        self._numbers = itertools.count()
        # Whoever needs memory makes room from whatever thread; taken before that of a layer.
        self._changing, self._is_growing = threading.RLock(), False
        accountant.on_shortage(self._make_room)

    @property
    def held_bytes(self) -> int:
        """Bytes of codes, which are counted as hot; their rows' tables come on top."""
        return self._counted

    @property
    def hold_all(self) -> bool:
        """Whether there is room for the codes of all rows."""
        return self._capacity >= self.covered

    def begin_step(self) -> None:
        """Note that a forward pass begins, and take or give back memory."""
        with self._changing:
            for one in self.layers:
                with one.changing:
                    one.begin_step()
            moment = self._accountant.changes, self._least_hot()
            if self._fitted != moment or not self._is_whole:
                self.fit()

    def numbered(self, statistics: ChannelStatistics) -> SegmentValues:
        """Return statistics of a segment's values under a number that no kept code has."""
        return SegmentValues(statistics, next(self._numbers))

    def encode(self, values: torch.Tensor, own: SegmentValues) -> NDArray[np.uint8]:
        """Return code rows of tokens of one segment, uint8 (tokens, row_bytes).

        Parameters
        ----------
        values
            float16 (tokens, kv_heads, head_dim).
        own
            The segment's.
        """
        rows = np.empty((len(values), self.coder.row_bytes), np.uint8)
        self.coder.encode_rows(values, own.statistics, rows)
        return rows

    def find(
        self, layer: int, rows: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], list[NDArray[np.uint8]]]:
        """Return where codes of a layer lie; see `CodePool.find`. They are noted as wanted."""
        if len(rows):
            self._cover(int(rows.max()) + 1)
        with (pool := self.layers[layer]).changing:
            pool.want(rows)
            return pool.find(rows, numbers)

    def look(self, layer: int, call: Callable[[int], bool]) -> bool:
        """Return what a call of the library says that looks at codes of a layer, and offers some.

        Nobody else changes them meanwhile, and codes of other layers are nobody's.

        Parameters
        ----------
        layer, call
            Which one, and what is given the address of its table.
        """
        with (pool := self.layers[layer]).changing:
            return call(pool.address)

    def cover(self, rows: int) -> None:
        """Have tables for row numbers below that, and memory for codes."""
        if rows > self.covered:
            with self._changing:
                self._cover(rows)
                self.fit()

    def offer(self, layer: int, rows: Rows, numbers: Rows, codes: NDArray[np.uint8]) -> None:
        """Keep codes of a layer where they are worth it; see `CodePool.offer`."""
        if not len(rows):
            return
        self.cover(int(rows.max()) + 1)
        with (pool := self.layers[layer]).changing:
            pool.offer(rows, numbers, codes)

    def worth(self, layer: int, rows: NDArray[np.int64]) -> NDArray[np.float16]:
        """Return what codes of a layer's rows are worth keeping, for a session."""
        with (pool := self.layers[layer]).changing:
            return pool.worth(rows)

    def recall(self, layer: int, rows: NDArray[np.int64], worth: NDArray[np.float16]) -> None:
        """Go on from what codes of a layer's rows were worth when a session was saved."""
        if len(rows):
            self._cover(int(rows.max()) + 1)
            with (pool := self.layers[layer]).changing:
                pool.recall(rows, worth)

    def forget_groups(self, groups: list[int]) -> None:
        """Keep no codes of groups that were given back, in any layer."""
        rows = np.asarray(groups, np.int64)[:, None] * GROUP_TOKENS + np.arange(GROUP_TOKENS)
        for one in self.layers:
            with one.changing:
                one.forget(rows.reshape(-1))

    def fit(self) -> None:
        """Take as much memory as codes may have now, or give back what they may not."""
        with self._changing:
            layers, changes, least = len(self.layers), self._accountant.changes, self._least_hot()
            left = self._accountant.bytes_for_hot_rows - least
            all_codes = self.covered * self._slot_bytes * layers
            granted = all_codes if all_codes <= left else int(max(0, left) * CODE_SHARE)
            slots = min(granted // (layers * self._slot_bytes), self.covered)
            capacity = slots // CHUNK_SLOTS * CHUNK_SLOTS
            # A change has hot rows ranked. The last slots that are missing are taken, however few.
            is_worth_it = min(self._capacity + self._capacity // 16, self.covered)
            is_changed = capacity < self._capacity or is_worth_it <= capacity != self._capacity
            if is_changed or not self._is_whole:
                self._resize(capacity)
            # Where others took the memory first, the next step tries again.
            is_had = not is_changed or self._capacity == capacity
            self._fitted = changes if is_had else -1, least

    def _cover(self, rows: int) -> None:
        """Have tables for row numbers below that."""
        with self._changing:
            if rows <= self.covered:
                return
            covered = -(-rows // TABLE_GROWTH_ROWS) * TABLE_GROWTH_ROWS
            more = (covered - self.covered) * ROW_TABLE_BYTES * len(self.layers)
            with self._accountant.taking(Part.OTHER, more):
                for one in self.layers:
                    with one.changing:
                        one.cover(covered)
            self.covered = covered

    def _make_room(self) -> None:
        """Give up what codes hold beyond their share, now that something else wants memory."""
        with self._changing:
            short = self._accountant.short_bytes
            # What is wanted for codes themselves, nobody gives codes up for.
            if short and not self._is_growing:
                chunk = CHUNK_SLOTS * self._slot_bytes * len(self.layers)
                gone = -(-short // chunk) * CHUNK_SLOTS
                self._resize(max(0, self._capacity - gone))

    def _resize(self, capacity: int) -> None:
        size = capacity * self._slot_bytes * len(self.layers)
        self._is_whole = False
        self._set_aside(size)
        if size > self._counted:
            if not self._take(size - self._counted):
                self._set_aside(self._counted)
                self._is_whole = True
                return
            self._counted = size
        self._capacity = capacity
        for one in self.layers:
            with one.changing:
                one.resize(capacity)
        before, self._counted = self._counted, size
        self._accountant.give(Part.HOT, before - size)
        self._freed.note(before - size)
        self._is_whole = True

    def _take(self, byte_count: int) -> bool:
        """Count memory that hot rows give way for; it may be that others have taken it."""
        self._is_growing = True
        try:
            self._accountant.take(Part.HOT, byte_count)
        except BudgetError:
            return False
        finally:
            self._is_growing = False
        return True
