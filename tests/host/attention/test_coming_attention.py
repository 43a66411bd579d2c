# SPDX-License-Identifier: Apache-2.0
"""Attention while rows land gives the bits of attention to rows that were all there."""

import ctypes
import os

import numpy as np
import pytest
import torch
from native_cases import Rows, every_variant, native_attention, same_bits, shape_of, tell
from single_reads import SingleReads
from twins.python_reads import ThreadEngine

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import RowSums
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import aligned_buffer
from hillinfer.drive.landing import WantedRows
from hillinfer.errors import ColdPoolError
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.hot_pool import HotPool
from hillinfer.kv.pool_policies import PoolPolicy
from hillinfer.kv.sequence import Sequence
from hillinfer.memory_budget import Accountant
from hillinfer.model_shape import StoredType
from hillinfer.native.library import native_library
from hillinfer.native.selected import Coming, ComingAttention, MissList, SelectedRows
from hillinfer.native.structures import DecodeStep, Shape
from hillinfer.settings import IOChoice
from hillinfer.statistics import Counters

SHAPE = shape_of(2, 3, 32)
TILE = 64


class Short(SingleReads):
    """A drive that gives back every third read as one that brought nothing."""

    def __init__(self):
        self.reads = self.again = 0

    def read_done(self, descriptor, into, offset, result):
        self.reads += 1
        return 0 if self.reads % 3 == 0 else result

    def preadv(self, descriptor, into, offset):
        self.again += 1
        return super().preadv(descriptor, into, offset)


class Scene:
    """All rows of a selection on a drive, some of them in memory too."""

    def __init__(self, folder, count, engine, variant, buffer_bytes=1 << 16, calls=None):
        self.rows = Rows(SHAPE, count)
        self.attention = native_attention(variant, SHAPE)
        calls = calls or DriveCalls()
        self.engine = (
            ThreadEngine(2) if engine == "twin" else open_engine(IOChoice(engine), 3, calls)
        )
        groups = np.arange(-(-count // 64))
        sums = RowSums(1, Accountant(1 << 30))
        self.store = ColdStore(
            folder, SHAPE, buffer_bytes, self.engine, Counters(), calls, sums=sums
        )
        self.store.cover(len(groups))
        size = 64 * len(groups) * SHAPE.row_bytes
        content = aligned_buffer(size)[:size].reshape(-1, SHAPE.row_bytes)
        content[:] = 0
        content[:count] = self.rows.memory[self.rows.places]
        self.store.write_groups(0, groups, content, lambda: None)
        self.store.settle_all(0)
        self.query = self.rows.query.float().contiguous()
        self.step = DecodeStep(
            shape=Shape(kv_heads=SHAPE.kv_heads, head_dim=SHAPE.head_dim),
            query=self.query.data_ptr(),
            head_stride=SHAPE.head_dim,
            group_size=SHAPE.group_size,
            stored_type=0 if SHAPE.stored_type is StoredType.BFLOAT16 else 1,
            scaling=self.rows.scaling,
            threads=2,
            # No hits are counted.
            fade_shift=-1,
        )
        self.coming = ComingAttention(variant.number, self.attention.state_bytes, SHAPE.row_bytes)
        self.sets = [np.arange(count)]

    def attend(self, cold, ends):
        """Return the output where some rows are cold, run after run."""
        out = torch.empty(SHAPE.query_heads, SHAPE.head_dim)
        count, addresses = len(self.rows.places), self.rows.addresses
        addresses[cold] = 0
        selected = self.looked_for()
        selected.addresses[:] = addresses
        self.coming.begin(ctypes.addressof(self.step), selected, out.data_ptr())
        landed = []
        for start, stop in zip([0, *ends], [*ends, count], strict=True):
            own = cold[(cold >= start) & (cold < stop)]
            run = self.coming.run(start, stop)
            if len(own):
                memory = np.full((2 * len(own), SHAPE.row_bytes), 0xFF, np.uint8)
                places = np.random.default_rng(stop).permutation(len(memory))[: len(own)]
                coming = Coming(self.coming, run, own - start)
                self.store.read_rows(WantedRows(0, own, memory, places, coming))
                landed.append(memory)
            self.coming.end()
            assert run.all()
        return out

    def looked_for(self):
        """Return the sets as the library has them once it found all of their rows cold."""
        count, row_bytes = len(self.rows.places), SHAPE.row_bytes
        groups = -(-count // 64)
        pool, sequence = HotPool(row_bytes, 1, PoolPolicy()), Sequence(1, row_bytes)
        pool.cover(64 * groups)
        sequence.append_groups(range(groups))
        sequence.set_length(0, 64 * groups, 64 * groups)
        selected, misses = SelectedRows(len(self.sets), count, count), MissList(count)
        tell(selected, self.sets)
        is_hot = native_library().decode(
            "hillinfer_attend_tokens",
            self.coming.table.variant,
            sequence.table_addresses[0],
            pool.table_address,
            ctypes.addressof(self.step),
            selected.address,
            misses.address,
            None,
        )
        assert not is_hot
        assert selected.rows.tolist() == list(range(count)), "every row is in a set"
        return selected

    def expected(self):
        addresses = self.rows.addresses
        given = self.rows.query, self.rows.scaling, [addresses[own] for own in self.sets]
        return self.attention.attend(*given)

    def close(self):
        self.store.close()
        self.engine.close()


@pytest.fixture
def make_scene(tmp_path):
    made = []

    def make(*given, **changes):
        made.append(Scene(tmp_path, *given, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@every_variant
@pytest.mark.parametrize("engine", ["threads", "uring", "twin"])
@pytest.mark.parametrize("count", [1, 64, 130, 512, 1100])
def test_bits_do_not_depend_on_what_comes(make_scene, variant, engine, count):
    scene, random = make_scene(count, engine, variant), np.random.default_rng(count)
    expected = scene.expected()
    for share in (0.02, 0.3, 1.0):
        cold = np.flatnonzero(random.random(count) < share)
        tiles = np.arange(TILE, count, TILE)
        for ends in ([], random.permutation(tiles)[:3], tiles):
            assert same_bits(scene.attend(cold, np.sort(ends).tolist()), expected)
    assert scene.coming.seconds > 0
    # The twin: one bit of one row in memory.
    scene.rows.memory[scene.rows.places[-1], -1] ^= 1
    assert not same_bits(scene.attend(np.arange(count - 1), []), expected)


def two_sets(count, share=0.6):
    """Two sets of one length that have all rows together, and some of them both."""
    random = np.random.default_rng(count)
    mixed, own = random.permutation(count), int(np.ceil(count * share))
    return [np.sort(mixed[:own]), np.sort(mixed[count - own :])]


@every_variant
@pytest.mark.parametrize(
    ("engine", "count"),
    [
        # Each engine with few rows and with many; how many tiles there are is no engine's matter.
        ("twin", 2),
        ("threads", 65),
        ("uring", 130),
        ("twin", 700),
        ("threads", 700),
        ("uring", 1900),
    ],
)
def test_sets_of_their_own_come_as_one_set_does(make_scene, variant, engine, count):
    """Runs end anywhere in a set's tiles: what is left of one waits for the next run."""
    scene, random = make_scene(count, engine, variant), np.random.default_rng(count)
    for share in (0.5, 0.6, 1.0):
        scene.sets = two_sets(count, share)
        expected = scene.expected()
        for cold_share in (0.02, 0.3, 1.0):
            cold = np.union1d(np.flatnonzero(random.random(count) < cold_share), [count - 1])
            anywhere = np.unique(random.integers(1, count, 4))
            for ends in ([], anywhere, np.arange(7, count, 31)):
                assert same_bits(scene.attend(cold, np.asarray(ends).tolist()), expected)
    # Each head has its own set, and the twin: one bit of one row in memory.
    scene.sets = two_sets(count)[::-1]
    assert not same_bits(scene.attend(np.arange(count), []), scene.expected().flip(0))
    expected = scene.expected()
    scene.rows.memory[scene.rows.places[0], SHAPE.row_bytes - 1] ^= 1
    scene.rows.memory[scene.rows.places[0], SHAPE.row_bytes // 2 + 1] ^= 1
    assert not same_bits(scene.attend(np.arange(1, count), [count // 2]), expected)


@pytest.mark.parametrize("engine", ["threads", "uring"])
def test_rows_that_come_in_many_batches_are_attended_to_once(make_scene, engine):
    """A buffer of few rows lands a selection in many goes of one call."""
    variant = native_library().variants[0]
    scene = make_scene(700, engine, variant, buffer_bytes=3 << 12)
    for cold in (np.arange(700), np.arange(0, 700, 7), np.arange(500, 700)):
        assert same_bits(scene.attend(cold, []), scene.expected())


@pytest.mark.parametrize("engine", ["threads", "uring"])
def test_rows_that_come_by_a_second_read_are_attended_to_once(make_scene, engine):
    calls = Short()
    scene = make_scene(700, engine, native_library().variants[0], 5 << 12, calls)
    for cold in (np.arange(700), np.arange(0, 700, 7)):
        before = calls.again
        assert same_bits(scene.attend(cold, [256]), scene.expected())
        assert calls.again > before


@pytest.mark.parametrize("engine", ["threads", "uring", "twin"])
def test_a_row_that_changed_on_the_drive_is_told(make_scene, engine):
    scene = make_scene(300, engine, native_library().variants[0])
    descriptor = os.open(f"/proc/self/fd/{scene.store.files[0].descriptor}", os.O_RDWR)
    place = 200 * SHAPE.row_bytes
    byte = os.pread(descriptor, 1, place)[0]
    os.pwrite(descriptor, bytes([byte ^ 1]), place)
    os.fsync(descriptor)
    os.close(descriptor)
    with pytest.raises(ColdPoolError, match="not what was written"):
        scene.attend(np.arange(150, 250), [])
    # What follows begins anew.
    assert same_bits(scene.attend(np.arange(100), []), scene.expected())
