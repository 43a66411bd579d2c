# SPDX-License-Identifier: Apache-2.0
"""Tables become longer where they lie, so that no place they had before stays as memory."""

import ctypes
import mmap
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hillinfer.drive.checksums import RowSums
from hillinfer.engine.runtime import Runtime
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_policies import LayerShares, PoolPolicy
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.split import ReusedRows
from hillinfer.native.tables import PoolTables, SequenceTables
from hillinfer.settings import PoolSizes, Settings
from hillinfer.shadow.values import CodePool, ValueCodes
from hillinfer.system.growing_tables import GrowingTable
from hillinfer_model.kernel_spec import KernelSpec

STEPS = 128


def grown_by_steps(item, empty=0):
    """Return a table's arrays of one growth after the other, and the table; all are kept."""
    table, arrays = GrowingTable(item, empty), [np.zeros(0, item)]
    for step in range(1, STEPS + 1):
        arrays.append(table.grown(arrays[-1], step * TABLE_GROWTH_ROWS))
        arrays[-1][-TABLE_GROWTH_ROWS:] += step
    return arrays[1:], table


@pytest.mark.parametrize(("item", "empty"), [(np.uint32, 0), (np.int32, -1), (np.float16, 0)])
def test_entries_stay_and_new_ones_are_empty(item, empty):
    arrays, _ = grown_by_steps(item, empty)
    wanted = np.repeat(np.arange(1, STEPS + 1) + empty, TABLE_GROWTH_ROWS)
    for step, own in enumerate(arrays, 1):
        assert np.array_equal(own, wanted[: step * TABLE_GROWTH_ROWS])


def row_sums():
    sums = RowSums(1, Accountant(1 << 30))

    def address(rows):
        sums.cover(rows)
        return sums.expected(0)

    return address


def code_table(name, change):
    pool = CodePool(8)

    def address(rows):
        getattr(pool, change)(rows)
        return getattr(pool.columns, name)

    return address


def slots_of_rows():
    pool = PoolTables(64, 64)

    def address(rows):
        pool.cover(rows)
        return pool.slot_of_row

    return address


def hits():
    tables = SequenceTables(1, 64)

    def address(tokens):
        tables.hits.cover(0, tokens)
        return tables.hits.counts[0]

    return address


TABLES = {
    "sums": row_sums,
    "slots of codes": lambda: code_table("slots", "cover"),
    "worth of codes": lambda: code_table("worth", "cover"),
    "rows of codes": lambda: code_table("rows", "resize"),
    "numbers of codes": lambda: code_table("numbers", "resize"),
    "slots of rows": slots_of_rows,
    "hits": hits,
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_move_a_few_times_and_not_with_each_growth(name):
    """What a move leaves behind in the heap nothing counts."""
    grow, arrays = TABLES[name](), []
    for step in range(1, STEPS + 1):
        arrays.append(grow(step * TABLE_GROWTH_ROWS))
        arrays[-1][-1] = step
    # All of them are kept, so no place is another's.
    places = [one.ctypes.data for one in arrays]
    large = [one for one, array in zip(places, arrays, strict=True) if array.nbytes >= 128 << 10]
    assert len(set(large)) <= 1 + np.log2(STEPS)
    last = arrays[-1]
    assert last[TABLE_GROWTH_ROWS - 1 :: TABLE_GROWTH_ROWS].tolist() == list(range(1, STEPS + 1))
    # Those of before show what they showed, wherever the table lies now.
    for step, own in enumerate(arrays, 1):
        assert own[-1] == step


def test_what_moves_is_counted_twice_while_it_does():
    accountant = Accountant(1 << 30)
    sums = RowSums(2, accountant)
    table = TABLE_GROWTH_ROWS * 4
    sums.cover(2 * TABLE_GROWTH_ROWS)
    assert accountant.peak()[Part.OTHER] == accountant.held()[Part.OTHER] == 4 * table
    # There is room for two, so three move and four do not.
    sums.cover(2 * TABLE_GROWTH_ROWS + 1)
    assert accountant.peak()[Part.OTHER] == (6 + 2) * table
    sums.cover(3 * TABLE_GROWTH_ROWS + 1)
    assert accountant.held()[Part.OTHER] == accountant.peak()[Part.OTHER] == 8 * table


def resident_pages(array):
    """Return how many pages of an array's mapping are memory."""
    first = array.ctypes.data // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as table:
        table.seek(8 * first)
        words = np.frombuffer(table.read(8 * (array.nbytes // mmap.PAGESIZE)), np.uint64)
    return int((words >> np.uint64(63)).sum())


def test_room_is_no_memory_and_what_is_cut_is_none_any_more():
    entries = mmap.PAGESIZE
    table = GrowingTable(np.int32, -1)
    whole = table.grown(np.zeros(0, np.int32), 8 * entries)
    own = table.cut(whole, 5 * entries)
    own = table.cut(own, 4 * entries + 1)
    assert len(own) == 4 * entries + 1
    assert resident_pages(whole) == 4 * 4 + 1
    again = table.grown(own, 6 * entries)
    assert again.ctypes.data == whole.ctypes.data
    assert (again == -1).all()
    # The twin: room that was written to is memory.
    assert resident_pages(whole) == 6 * 4


def test_a_growth_that_nobody_took_is_made_again():
    """An interrupt comes after the table has moved, and before anybody has the new array."""
    table = GrowingTable(np.int32, -1)
    own = table.grown(np.zeros(0, np.int32), 1024)
    table.grown(own, 2048)
    own[:] = 7
    again = table.grown(own, 3000)
    assert (again[:1024] == 7).all()
    assert (again[1024:] == -1).all()


# The largest piece that a heap may still have for what is asked of it under `room_for`.
PIECE = 8 << 20

LIBC = ctypes.CDLL(None)
MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", LIBC))
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", LIBC))


@contextmanager
def room_for(byte_count):
    """Leave so much address space, and no more than pieces of what the heap holds free.

    What other tests of this process have given back to the heap is no longer counted by the
    system: the heap would serve a large table from it without asking for anything.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE, hard))
    taken = []
    try:
        while piece := MALLOC(PIECE):
            taken.append(piece)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + byte_count, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for piece in taken:
            FREE(piece)


def test_what_a_heap_has_left_free_is_no_room():
    # A block of 30 MiB given back makes the heap serve its like itself, from then on.
    FREE(MALLOC(30 << 20))
    *left, above = [MALLOC(20 << 20) for _ in range(24)]
    for piece in left:
        FREE(piece)
    with room_for(48 << 20):
        assert not MALLOC(200 << 20)
        # The twin: what there is room for is had.
        there = MALLOC(40 << 20)
        assert there
        FREE(there)
    FREE(above)


# Of four bytes each. A power of two that holds them is 512 MiB.
MANY = 80 << 20


def test_where_no_address_space_is_left_the_heap_has_the_entries():
    table = GrowingTable(np.int32, -1)
    own = table.grown(np.zeros(0, np.int32), 1024)
    own[:] = 7
    with room_for(400 << 20):
        more = table.grown(own, MANY)
        with pytest.raises(MemoryError):
            table.grown(more, 8 * MANY)
    assert len(table.cut(more, MANY // 2)) == MANY // 2
    # The twin: with room it lies in pages of its own again.
    again = table.grown(more, MANY + 1024)
    for one in (more, again[:MANY]):
        assert (one[:1024] == 7).all()
        assert (one[1024:] == -1).all()


def test_sums_that_the_system_has_no_memory_for_are_not_counted():
    accountant = Accountant(1 << 30)
    sums = RowSums(2, accountant)
    sums.cover(TABLE_GROWTH_ROWS)
    sums.take(0, slice(None), np.arange(TABLE_GROWTH_ROWS, dtype=np.uint32))
    before = accountant.held()
    # For one layer's table, and not for two.
    with room_for(640 << 20), pytest.raises(MemoryError):
        sums.cover(MANY)
    assert accountant.held() == before
    assert [len(sums.expected(layer)) for layer in range(2)] == [TABLE_GROWTH_ROWS] * 2
    sums.cover(2 * TABLE_GROWTH_ROWS)
    assert accountant.held()[Part.OTHER] == 2 * before[Part.OTHER]
    assert sums.expected(0)[:TABLE_GROWTH_ROWS].tolist() == list(range(TABLE_GROWTH_ROWS))
    assert not sums.expected(0)[TABLE_GROWTH_ROWS:].any()


def test_codes_tables_that_the_system_has_no_memory_for_are_not_counted():
    accountant = Accountant(1 << 30)
    codes = ValueCodes(KernelSpec(16, 2, 1), 2, accountant, lambda: 1 << 30, lambda _: None)
    codes.cover(TABLE_GROWTH_ROWS)
    before = accountant.held()
    # The rows' slots fit, and neither what they are worth nor those of the other layer.
    with room_for(560 << 20), pytest.raises(MemoryError):
        codes.cover(MANY)
    assert accountant.held() == before
    codes.cover(2 * TABLE_GROWTH_ROWS)
    assert accountant.held()[Part.OTHER] == 2 * before[Part.OTHER]


def test_a_sequence_that_the_system_has_no_memory_for_is_not_counted(cold_dir):
    # Open groups of 96 MiB.
    shape = ModelShape(96, 32, 32, 128, StoredType.FLOAT16, 4096)
    runtime = Runtime(shape, Settings(), 4 << 30, cold_dir)
    first = runtime.open_sequence()
    before = runtime.parts.accountant.held()
    for make in (runtime.open_sequence, lambda: runtime.fork(first)):
        with room_for(48 << 20), pytest.raises(MemoryError):
            make()
        assert runtime.parts.accountant.held() == before
    # The twin: one that there is memory for is counted.
    runtime.fork(first)
    assert runtime.parts.accountant.held()[Part.HOT] > before[Part.HOT]
    runtime.close()


# Of four bytes each: a table of 256 MiB.
SOME = 64 << 20


def hot_pools(accountant):
    shape = ModelShape(2, 2, 2, 16, StoredType.FLOAT16, 4096)
    pools = HotPools(shape, accountant, PoolPolicy(), LayerShares(2, PoolSizes.EQUAL))
    pools.cover(TABLE_GROWTH_ROWS)
    return pools


def test_slots_of_rows_that_the_system_has_no_memory_for_are_not_counted():
    accountant = Accountant(1 << 30)
    pools = hot_pools(accountant)
    before = accountant.held()[Part.OTHER]
    table = SOME * 4 - before // 2
    # For no layer's table, then for one and not for two.
    for room, there in ((200 << 20, 0), (400 << 20, 1)):
        with room_for(room), pytest.raises(MemoryError):
            pools.cover(SOME)
        assert accountant.held()[Part.OTHER] == before + there * table
    # The twin: what there is memory for is counted.
    pools.cover(SOME)
    assert accountant.held()[Part.OTHER] == before + 2 * table
    assert [len(pool.slot_of_row) for pool in pools.layers] == [SOME] * 2
    pools.close()


def test_hits_that_the_system_has_no_memory_for_are_not_counted():
    accountant, hits = Accountant(1 << 30), SequenceTables(1, 64).hits
    pools = hot_pools(accountant)
    before = accountant.held()[Part.OTHER]
    with room_for(200 << 20), pytest.raises(MemoryError):
        pools.cover_hits(hits, 0, 2 * SOME)
    assert accountant.held()[Part.OTHER] == before
    pools.cover_hits(hits, 0, 2 * SOME)
    assert accountant.held()[Part.OTHER] == before + hits.byte_count
    assert hits.byte_count == 4 * SOME
    pools.close()


def test_rows_of_a_step_that_the_system_has_no_memory_for_are_not_counted():
    accountant = Accountant(1 << 30)
    rows = ReusedRows(64, accountant)
    with room_for(200 << 20), pytest.raises(MemoryError):
        rows.take(SOME // 16)
    assert accountant.held()[Part.STAGING] == 0
    rows.take(SOME // 16)
    assert accountant.held()[Part.STAGING] == 4 * SOME
