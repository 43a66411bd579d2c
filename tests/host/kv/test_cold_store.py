# SPDX-License-Identifier: Apache-2.0
"""Groups written in the background and rows read back, on a real file."""

import os
import threading

import numpy as np
import pytest
from drive_fixtures import in_the_place_of
from faulty_calls import WithoutDirectIO
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import RowSums, sums_of
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import ColdFile, IOMode, aligned_buffer, probe_io_mode
from hillinfer.drive.landing import WantedRows
from hillinfer.drive.shared_files import RowBase
from hillinfer.errors import ColdPoolError
from hillinfer.kv.cold_store import ColdStore
from hillinfer.memory_budget import Accountant
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import IOChoice
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import ReadCost


def shape_of(row_bytes, layers=2):
    return ModelShape(
        layers=layers,
        kv_heads=1,
        query_heads=1,
        head_dim=row_bytes // 4,
        stored_type=StoredType.FLOAT16,
        max_positions=1000,
    )


def groups_of(seed, count, row_bytes):
    rows = aligned_buffer(count * 64 * row_bytes)[: count * 64 * row_bytes]
    rows[:] = np.random.default_rng(seed).integers(0, 256, len(rows), np.uint8)
    return rows.reshape(count * 64, row_bytes)


@pytest.fixture(params=IOMode)
def mode(request, cold_dir):
    if request.param is IOMode.DIRECT and probe_io_mode(cold_dir) is not IOMode.DIRECT:
        pytest.skip(f"the file system of {cold_dir} has no direct I/O: set --basetemp to a drive")
    return request.param


@pytest.fixture
def make_store(cold_dir, engine_choice):
    stores = []

    def make(
        row_bytes=64,
        read_buffer_bytes=1 << 16,
        io_threads=2,
        layers=2,
        mode=IOMode.DIRECT,
        calls=None,
    ):
        counters = Counters()
        if mode is IOMode.BUFFERED:
            calls = WithoutDirectIO()
        engine = open_engine(engine_choice, io_threads, DriveCalls())
        store = ColdStore(
            cold_dir, shape_of(row_bytes, layers), read_buffer_bytes, engine, counters, calls
        )
        stores.append(store)
        stores.append(engine)
        return store, counters

    yield make
    for store in stores:
        store.close()


def write(store, layer, numbers, rows):
    store.write_groups(layer, np.asarray(numbers, np.int64), rows, lambda: None)


def read(store, layer, rows, row_bytes):
    out = aligned_buffer(len(rows) * row_bytes)[: len(rows) * row_bytes].reshape(-1, row_bytes)
    store.read_rows(WantedRows(layer, np.asarray(rows, np.int64), out, np.arange(len(rows))))
    return out


def read_ahead(store, layer, rows, row_bytes):
    out = np.zeros((len(rows), row_bytes), np.uint8)
    wanted = WantedRows(layer, np.asarray(rows, np.int64), out, np.arange(len(rows)))
    assert sum(count for count, _ in store.read_rows_ahead(wanted)) == len(rows)
    return out


class WritesWhenLet(DriveCalls):
    """A drive that writes nothing while it is held."""

    def __init__(self):
        self.let = threading.Event()
        self.let.set()

    def pwrite(self, descriptor, data, offset):
        self.let.wait(30)
        return super().pwrite(descriptor, data, offset)


@pytest.mark.parametrize("how", [read, read_ahead])
def test_rows_that_are_still_being_written_are_waited_for(make_store, how):
    calls = WritesWhenLet()
    store, _ = make_store(calls=calls)
    calls.let.clear()
    rows = groups_of(5, 1, 64)
    write(store, 0, [0], rows)
    threading.Timer(0.1, calls.let.set).start()
    assert (how(store, 0, np.arange(64), 64) == rows).all()
    assert calls.let.is_set()


def test_rows_come_back_bit_by_bit(mode, make_store):
    @settings(max_examples=10, deadline=None)
    @given(
        row_bytes=st.sampled_from([64, 192, 768, 4160, 12_288, 16_384]),
        numbers=st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True),
        pieces=st.integers(1, 3),
        seed=st.integers(0, 100),
        read_buffer_bytes=st.sampled_from([1, 20_000, 1 << 18]),
        io_threads=st.integers(1, 5),
    )
    def check(row_bytes, numbers, pieces, seed, read_buffer_bytes, io_threads):
        store, counters = make_store(row_bytes, read_buffer_bytes, io_threads, mode=mode)
        assert store.io_mode is mode
        content = {}
        for layer in (0, 1):
            for part in np.array_split(np.array(numbers), pieces):
                rows = groups_of(seed + layer * 50 + len(content), len(part), row_bytes)
                if len(part):
                    write(store, layer, part, rows)
                for i, number in enumerate(part.tolist()):
                    content[layer, number] = rows[i * 64 : (i + 1) * 64]
        chooser = np.random.default_rng(seed)
        stored = (np.array(numbers)[:, None] * 64 + np.arange(64)).reshape(-1)
        for layer in (1, 0):
            wanted = chooser.choice(stored, chooser.integers(1, len(stored) + 1), replace=False)
            expected = np.stack([content[layer, row // 64][row % 64] for row in wanted.tolist()])
            before = counters.cold_read_bytes, counters.cold_useful_bytes
            np.testing.assert_array_equal(read(store, layer, wanted, row_bytes), expected)
            assert counters.cold_useful_bytes - before[1] == len(wanted) * row_bytes
            assert counters.cold_read_bytes - before[0] >= len(wanted) * row_bytes
        assert counters.cold_write_bytes == 2 * len(numbers) * 64 * row_bytes
        store.close()

    check()


def test_rows_go_to_the_places_asked_for_and_nowhere_else(mode, make_store):
    store, _ = make_store(mode=mode)
    rows = groups_of(1, 2, 64)
    write(store, 0, [0, 1], rows)
    out = np.full((6, 64), 255, np.uint8)
    store.read_rows(WantedRows(0, np.array([70, 3]), out, np.array([4, 1])))
    np.testing.assert_array_equal(out[4], rows[70])
    np.testing.assert_array_equal(out[1], rows[3])
    assert (out[[0, 2, 3, 5]] == 255).all()


def test_long_rows_go_straight_to_their_places_and_nowhere_else(mode, make_store):
    """None of the store's own buffer: it would not hold them together."""
    store, counters = make_store(16_384, mode=mode)
    rows = groups_of(1, 2, 16_384)
    write(store, 0, [0, 1], rows)
    out = aligned_buffer(8 * 16_384).reshape(-1, 16_384)
    out[:] = 255
    # Neighbours in the file and not in memory, in both, and in memory alone.
    wanted, places = np.array([70, 71, 3, 4, 9]), np.array([6, 0, 2, 3, 4])
    cost = store.read_rows(WantedRows(0, wanted, out, places))
    np.testing.assert_array_equal(out[places], rows[wanted])
    assert (out[[1, 5, 7]] == 255).all()
    assert cost == ReadCost(4, 5 * 16_384)
    assert counters.cold_read_bytes == 5 * 16_384
    # One of them changed would be seen.
    rows[3, 16_383] ^= 1
    assert (out[places] != rows[wanted]).sum() == 1


def test_a_bit_that_flips_on_the_drive_is_seen(make_store):
    store, _ = make_store()
    rows = groups_of(1, 1, 64)
    write(store, 0, [0], rows)
    store.settle(0, np.arange(4096))
    descriptor = os.open(f"/proc/self/fd/{store.files[0].descriptor}", os.O_RDWR)
    os.pwrite(descriptor, bytes([rows[5, 0] ^ 1]), 5 * 64)
    os.fsync(descriptor)
    os.close(descriptor)
    assert (read(store, 0, np.arange(64), 64) != rows).sum() == 1


def test_a_later_write_of_a_group_wins(make_store):
    store, _ = make_store()
    for seed in range(8):
        write(store, 0, [2], groups_of(seed, 1, 64))
    np.testing.assert_array_equal(read(store, 0, np.arange(128, 192), 64), groups_of(7, 1, 64))


def test_buffers_are_given_back_once_written(make_store):
    store, _ = make_store()
    done = threading.Event()
    store.write_groups(0, np.array([0]), groups_of(1, 1, 64), done.set)
    assert done.wait(60)


def full_drive(store, layer):
    """Put a device that is always full in the place of one layer's file."""
    return in_the_place_of(store.files[layer], "/dev/full", os.O_RDWR)


def test_a_write_that_failed_is_told_at_the_next_chance_and_for_ever(make_store):
    store, _ = make_store()
    done = threading.Event()
    with full_drive(store, 0):
        store.write_groups(0, np.array([0]), groups_of(1, 1, 64), done.set)
        assert done.wait(60), "the buffer comes back although the write failed"
        with pytest.raises(ColdPoolError, match="No space left"):
            store.settle(0, np.arange(4096))
    # There is space again, and a later group makes the file long enough: row 0 would read as zeros.
    write(store, 0, [1], groups_of(2, 1, 64))
    for use in (
        lambda: read(store, 0, [0], 64),
        lambda: read(store, 1, [0], 64),
        lambda: read_ahead(store, 0, [0], 64),
        lambda: store.settle(0, np.arange(4096)),
        store.check,
        store.check,
    ):
        with pytest.raises(ColdPoolError, match="No space left"):
            use()


def test_check_does_not_wait_but_tells(make_store):
    store, _ = make_store()
    store.check()
    with full_drive(store, 1):
        done = threading.Event()
        store.write_groups(1, np.array([0]), groups_of(1, 1, 64), done.set)
        assert done.wait(60)
        with pytest.raises(ColdPoolError, match="No space left"):
            store.check()


def test_a_drive_that_fails_while_reading(make_store):
    store, _ = make_store()
    write(store, 0, [0, 1], groups_of(1, 2, 64))
    store.settle(0, np.arange(4096))
    os.ftruncate(store.files[0].descriptor, 64 * 64)
    np.testing.assert_array_equal(read(store, 0, np.arange(64), 64), groups_of(1, 2, 64)[:64])
    with pytest.raises(ColdPoolError, match=r"rows of layer 0 .*is 4096 bytes .* should be 8192"):
        read(store, 0, [100], 64)


def test_closing_gives_the_drives_space_back(make_store):
    store, _ = make_store()
    write(store, 0, [0], groups_of(1, 1, 64))
    descriptors = [file.descriptor for file in store.files]
    store.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_reading_waits_only_for_writes_of_the_groups_it_wants(make_store):
    calls = WritesWhenLet()
    store, _ = make_store(calls=calls)
    rows = groups_of(5, 1, 64)
    write(store, 0, [0], rows)
    store.settle(0, np.arange(1))
    calls.let.clear()
    later = groups_of(6, 1, 64)
    write(store, 0, [1], later)
    out = np.zeros((64, 64), np.uint8)
    store.read_rows(WantedRows(0, np.arange(64), out, np.arange(64)))
    assert (out == rows).all()
    assert not calls.let.is_set()
    threading.Timer(0.1, calls.let.set).start()
    store.read_rows(WantedRows(0, np.arange(64, 128), out, np.arange(64)))
    assert calls.let.is_set()
    assert (out == later).all()


def test_frozen_groups_are_read_and_never_written(mode, make_store):
    @settings(max_examples=8, deadline=None)
    @given(
        row_bytes=st.sampled_from([64, 768, 4160]),
        frozen=st.integers(1, 5),
        later=st.integers(1, 5),
        read_buffer_bytes=st.sampled_from([1, 20_000, 1 << 18]),
        seed=st.integers(0, 100),
    )
    def check(row_bytes, frozen, later, read_buffer_bytes, seed):
        store, _ = make_store(row_bytes, read_buffer_bytes, mode=mode)
        rows = groups_of(seed, frozen + later, row_bytes)
        for layer in (0, 1):
            write(store, layer, np.arange(frozen), rows[: frozen * 64])
            store.settle_all(layer)
        before = list(store.files)
        store.freeze(frozen, store.fresh_files())
        assert store.others.are_used
        files = [os.fstat(file.descriptor) for file in before]
        later_rows = aligned_buffer(later * 64 * row_bytes)[: later * 64 * row_bytes]
        later_rows[:] = rows[frozen * 64 :].reshape(-1)
        for layer in (0, 1):
            write(
                store, layer, np.arange(frozen, frozen + later), later_rows.reshape(-1, row_bytes)
            )
        chooser = np.random.default_rng(seed)
        wanted = chooser.permutation(len(rows))[: chooser.integers(1, len(rows) + 1)]
        np.testing.assert_array_equal(read(store, 1, wanted, row_bytes), rows[wanted])
        order = chooser.permutation(frozen + later)
        whole = b"".join(bytes(piece) for piece in store.groups_in_order(0, order.tolist()))
        expected = rows.reshape(frozen + later, -1)[order].tobytes()
        assert whole == expected
        for then, file in zip(files, before, strict=True):
            assert os.fstat(file.descriptor).st_mtime_ns == then.st_mtime_ns
        for group in (0, frozen - 1):
            with pytest.raises(ValueError, match="never written"):
                write(store, 0, [group], rows[:64])
        with pytest.raises(ValueError, match="has a base already"):
            store.freeze(frozen, [])
        store.close()

    check()


def test_a_frozen_file_that_changes_is_seen(make_store):
    store, _ = make_store()
    rows = groups_of(1, 1, 64)
    write(store, 0, [0], rows)
    store.settle_all(0)
    frozen = store.files[0].descriptor
    store.freeze(1, store.fresh_files())
    descriptor = os.open(f"/proc/self/fd/{frozen}", os.O_RDWR)
    os.pwrite(descriptor, bytes([rows[5, 0] ^ 1]), 5 * 64)
    os.fsync(descriptor)
    os.close(descriptor)
    assert (read(store, 0, np.arange(64), 64) != rows).sum() == 1
    assert b"".join(map(bytes, store.groups_in_order(0, [0]))) != rows.tobytes()


def base_of(folder, mode, seed, count, row_bytes, key=None):
    """Return a base of two layers, and the rows of each."""
    files, content = [], []
    for layer in (0, 1):
        content.append(groups_of(seed * 2 + layer, count, row_bytes))
        files.append(ColdFile(folder, mode, f"base {seed} of layer {layer}"))
        files[-1].write(content[-1].reshape(-1).data, 0)
    sums = [sums_of(rows, np.arange(len(rows))) for rows in content]
    return RowBase(files, count, mode, sums, key), content


def test_rows_of_several_bases_and_of_the_own_files_come_together(mode, make_store, cold_dir):
    @settings(max_examples=8, deadline=None)
    @given(
        row_bytes=st.sampled_from([64, 768, 4160]),
        runs=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=6),
        read_buffer_bytes=st.sampled_from([1, 20_000, 1 << 18]),
        seed=st.integers(0, 100),
    )
    def check(row_bytes, runs, read_buffer_bytes, seed):
        store, _ = make_store(row_bytes, read_buffer_bytes, mode=mode)
        groups = sum(count for _, count in runs)
        store.cover(groups)
        rows, first = [np.zeros((groups * 64, row_bytes), np.uint8) for _ in (0, 1)], 0
        for number, (is_base, count) in enumerate(runs):
            part = slice(first * 64, (first + count) * 64)
            base, content = base_of(cold_dir, mode, seed * 10 + number, count, row_bytes)
            if is_base:
                store.add_base(first, base)
            for layer in (0, 1):
                rows[layer][part] = content[layer]
                if not is_base:
                    write(store, layer, np.arange(first, first + count), content[layer])
            if is_base:
                with pytest.raises(ValueError, match="never written"):
                    write(store, 0, [first + count - 1], content[0][:64])
            else:
                base.close()
            first += count
        chooser = np.random.default_rng(seed)
        for layer in (0, 1):
            wanted = chooser.permutation(len(rows[0]))[: chooser.integers(1, len(rows[0]) + 1)]
            np.testing.assert_array_equal(
                read(store, layer, wanted, row_bytes), rows[layer][wanted]
            )
            ahead = np.sort(wanted)
            np.testing.assert_array_equal(
                read_ahead(store, layer, ahead, row_bytes), rows[layer][ahead]
            )
            order = chooser.permutation(groups)
            whole = b"".join(bytes(one) for one in store.groups_in_order(layer, order.tolist()))
            assert whole == rows[layer].reshape(groups, -1)[order].tobytes()
        store.close()

    check()


def summed_store(cold_dir, counters=None):
    sums = RowSums(2, Accountant(1 << 30))
    engine = open_engine(IOChoice.THREADS, 2, DriveCalls())
    return ColdStore(
        cold_dir, shape_of(64), 1 << 16, engine, counters or Counters(), sums=sums
    ), engine


def test_numbers_of_a_base_that_is_gone_are_others_groups(cold_dir):
    store, engine = summed_store(cold_dir)
    mode = store.own_io_mode
    store.cover(8)
    one, first_rows = base_of(cold_dir, mode, 1, 3, 64)
    store.add_base(2, one)
    np.testing.assert_array_equal(read(store, 1, np.arange(128, 320), 64), first_rows[1])
    store.others.drop_base(2)
    with pytest.raises(ColdPoolError):
        one.files[0].read(aligned_buffer(4096).data, 0)
    store.others.drop_base(2)
    own = groups_of(50, 3, 64)
    write(store, 1, np.arange(2, 5), own)
    np.testing.assert_array_equal(read(store, 1, np.arange(128, 320), 64), own)
    # What was written there has other checksums, and may be on its way still.
    for seed in range(2, 12):
        write(store, 1, np.arange(2, 5), groups_of(seed, 3, 64))
        another, rows = base_of(cold_dir, mode, seed, 3, 64)
        store.add_base(2, another)
        np.testing.assert_array_equal(read(store, 1, np.arange(128, 320), 64), rows[1])
        store.others.drop_base(2)
    store.close()
    engine.close()


def test_a_base_that_changes_is_told_by_its_own_file_and_place(cold_dir):
    store, engine = summed_store(cold_dir)
    store.cover(8)
    write(store, 0, np.arange(2), groups_of(50, 2, 64))
    for first, seed in ((2, 1), (5, 2)):
        base, _ = base_of(cold_dir, store.own_io_mode, seed, 3, 64)
        store.add_base(first, base)
    descriptor = os.open(f"/proc/self/fd/{base.files[0].descriptor}", os.O_RDWR)
    (byte,) = os.pread(descriptor, 1, 70 * 64)
    os.pwrite(descriptor, bytes([byte ^ 1]), 70 * 64)
    os.fsync(descriptor)
    os.close(descriptor)
    with pytest.raises(ColdPoolError, match=r"64 bytes at 4480 of base 2 of layer 0 .* are not"):
        read(store, 0, np.arange(8 * 64), 64)
    assert len(read(store, 0, np.arange(5 * 64), 64)) == 320
    assert len(read(store, 1, np.arange(2 * 64, 8 * 64), 64)) == 384
    store.close()
    engine.close()
