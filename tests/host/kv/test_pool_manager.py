# SPDX-License-Identifier: Apache-2.0
"""What the manager counts, offers and learns, over real pools and sequences."""

import numpy as np
import pytest
from broken_policy import BrokenPolicy
from pool_cases import content

from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_manager import REDISTRIBUTION_STEPS, PoolManager
from hillinfer.kv.pool_policies import LayerShares, make_pool_policy
from hillinfer.kv.sequence import Sequence
from hillinfer.memory_budget import Accountant, Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import PoolSizes, Settings
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import LayerStep

SHAPE = ModelShape(
    layers=2,
    kv_heads=1,
    query_heads=1,
    head_dim=16,
    stored_type=StoredType.FLOAT16,
    max_positions=1000,
)
TABLES = 64 << 10


class Scene:
    """A manager with so many slots per layer, and sequences whose rows are numbers."""

    def __init__(self, slots, policy="counts", sizes=PoolSizes.EQUAL, **changes):
        chosen = Settings().changed(**({"kept_sinks": 1, "kept_recent": 2} | changes))
        rows = slots * SHAPE.layers * (SHAPE.row_bytes + SLOT_BYTES)
        ranking = make_pool_policy(policy) if isinstance(policy, str) else policy
        accountant = Accountant(TABLES + rows)
        self.pools = HotPools(SHAPE, accountant, ranking, LayerShares(SHAPE.layers, sizes))
        self.counters = Counters()
        self.manager = PoolManager(self.pools, ranking, chosen, self.counters)
        self.pools.cover(4096)
        # Hit-rate tables and row tables leave exactly the slots.
        self.accountant = accountant
        self.groups = 0

    def sequence(self, length):
        made = Sequence(SHAPE.layers, SHAPE.row_bytes)
        self.extend(made, length)
        return made

    def extend(self, sequence, length):
        for layer in range(SHAPE.layers):
            sequence.set_length(layer, length, length // 64 * 64)
        for _ in range(sequence.group_count, length // 64):
            sequence.append_groups([self.groups])
            self.groups += 1

    def clip(self, slots):
        """Leave room for so many slots per layer and nothing else."""
        row = SHAPE.layers * (SHAPE.row_bytes + SLOT_BYTES)
        self.accountant.take(Part.STAGING, self.accountant.spare_bytes - slots * row)

    def read(self, sequence, positions, step, layer=0):
        """Take a step that selects positions, of which those that are cold are offered."""
        positions = np.asarray(positions, np.int64)
        self.manager.begin_in_place(layer, sequence, positions, step)
        settled = positions[positions < sequence.tail_start(layer)]
        rows = sequence.rows(settled)
        cold = self.pools.layers[layer].slots(rows) < 0
        entry = LayerStep(step, layer, sequence.lengths[layer])
        source = content(rows, SHAPE.row_bytes)
        if cold.any():
            self.manager.offer_read(entry, sequence, settled[cold], source, np.flatnonzero(cold))
        self.pools.promotions.settle_all()
        return entry

    def hot(self, sequence, layer=0):
        positions = np.arange(sequence.tail_start(layer))
        return positions[self.pools.layers[layer].slots(sequence.rows(positions)) >= 0].tolist()


@pytest.fixture
def make_scene():
    made = []

    def make(*arguments, **named):
        made.append(Scene(*arguments, **named))
        return made[-1]

    yield make
    for scene in made:
        scene.pools.close()


def test_selected_tokens_are_counted_in_their_layer_and_sequence(make_scene):
    scene = make_scene(50)
    one, other = scene.sequence(150), scene.sequence(150)
    scene.read(one, [0, 5, 140, 149], 1)
    scene.read(one, [5], 2)
    scene.read(other, [5, 6], 2, layer=1)
    assert np.flatnonzero(one.hits.counts[0]).tolist() == [0, 5, 140, 149]
    assert one.hits.counts[0][5] == 2
    assert not one.hits.counts[1].any()
    assert np.flatnonzero(other.hits.counts[1]).tolist() == [5, 6]


def test_cold_rows_that_were_read_become_hot_in_equal_volumes(make_scene):
    scene = make_scene(0)
    sequence = scene.sequence(200)
    scene.pools.cover_hits(sequence.hits, 0, 200)
    scene.clip(5)
    first = scene.read(sequence, [10, 11, 12, 13, 14, 198, 199], 1)
    assert (first.promoted, first.demoted) == (5, 0)
    second = scene.read(sequence, [12, 13, 14, 30, 31, 198, 199], 2)
    # One hit each; of equals, what was selected later stays.
    assert (second.promoted, second.demoted) == (2, 2)
    assert scene.hot(sequence) == [12, 13, 14, 30, 31]
    third = scene.read(sequence, [14, 30, 31, 32, 198, 199], 3)
    assert (third.promoted, third.demoted) == (0, 0), "no hot row has fewer hits"
    assert (scene.counters.promoted_rows, scene.counters.demoted_rows) == (7, 2)


def test_what_a_step_selected_gives_way_in_the_next_at_the_earliest(make_scene):
    """Attention may be about to read it, while what was cold is promoted already."""
    scene = make_scene(0)
    sequence = scene.sequence(200)
    scene.pools.cover_hits(sequence.hits, 0, 200)
    scene.clip(1)
    scene.read(sequence, [10], 1)
    for _ in range(3):
        scene.manager.tally(0, sequence, np.array([20]))
    entry = scene.read(sequence, [10, 20], 2)
    assert (entry.promoted, entry.demoted) == (0, 0)
    assert scene.hot(sequence) == [10]
    entry = scene.read(sequence, [20], 3)
    assert (entry.promoted, entry.demoted) == (1, 1)
    assert scene.hot(sequence) == [20]


def test_rows_that_were_written_are_offered_and_not_counted(make_scene):
    scene = make_scene(0)
    sequence = scene.sequence(128)
    scene.pools.cover_hits(sequence.hits, 0, 128)
    scene.clip(10)
    positions = np.arange(64, 128)
    source = content(sequence.rows(positions), SHAPE.row_bytes)
    scene.manager.offer_written(0, sequence, positions, source, 1).result(20)
    # Their buffer may be used for something else from now on.
    source[:] = 0
    assert scene.hot(sequence) == list(range(118, 128))
    assert (scene.counters.promoted_rows, scene.counters.demoted_rows) == (0, 0)
    pool, rows = scene.pools.layers[0], sequence.rows(np.array([120]))
    assert (pool.columns.data[pool.slots(rows)] == content(rows, SHAPE.row_bytes)).all()


def test_rows_that_a_dense_pass_brought_are_as_old_as_the_pass(make_scene):
    """Whoever was selected before it gives way first, whenever memory was divided."""
    scene = make_scene(0, policy="lru")
    sequence = scene.sequence(128)
    scene.pools.cover_hits(sequence.hits, 0, 128)
    scene.clip(20)
    scene.manager.begin_step(REDISTRIBUTION_STEPS)
    scene.manager.begin_step(REDISTRIBUTION_STEPS + 1)
    scene.read(sequence, range(10, 20), REDISTRIBUTION_STEPS + 1)
    scene.manager.begin_step(REDISTRIBUTION_STEPS + 2)
    brought = np.arange(40, 50)
    with scene.manager.seeing(0, sequence) as offer:
        offer(brought, content(sequence.rows(brought), SHAPE.row_bytes)).result(20)
    assert scene.hot(sequence) == [*range(10, 20), *range(40, 50)]
    scene.read(sequence, range(60, 70), REDISTRIBUTION_STEPS + 3)
    assert scene.hot(sequence) == [*range(40, 50), *range(60, 70)]


def test_kept_tokens_stay_hot_as_a_sequence_grows(make_scene):
    """The newest settled tokens are kept while they are recent, and no longer."""
    scene = make_scene(0, kept_sinks=2, kept_recent=4)
    sequence = scene.sequence(128)
    scene.pools.cover_hits(sequence.hits, 0, 256)
    scene.clip(6)
    scene.read(sequence, [0, 1, 124, 125, 126, 127], 1)
    for step in range(2, 6):
        scene.read(sequence, [0, 1, 30, 40, 124, 125, 126, 127], step)
    assert scene.hot(sequence) == [0, 1, 124, 125, 126, 127]
    scene.extend(sequence, 130)
    scene.read(sequence, [0, 1, 30, 40, 126, 127, 128, 129], 6)
    assert scene.hot(sequence) == [0, 1, 30, 40, 126, 127]


def test_kept_tokens_of_one_sequence_are_not_demoted_for_another(make_scene):
    scene = make_scene(0, policy="lru", kept_sinks=1, kept_recent=3)
    short, long = scene.sequence(64), scene.sequence(640)
    for sequence in (short, long):
        scene.pools.cover_hits(sequence.hits, 0, 640)
    scene.clip(10)
    for step in range(1, 9):
        scene.read(short, [0, step + 10, step + 20, 61, 62, 63], step)
        scene.read(long, [0, step + 100, step + 300, step + 500, 637, 638, 639], step)
        assert {0, 61, 62, 63} <= set(scene.hot(short))
        assert {0, 637, 638, 639} <= set(scene.hot(long))
    # And neither holds the others' places for good.
    assert {18, 28} & set(scene.hot(short)) or {108, 308, 508} & set(scene.hot(long))


def test_a_long_sequence_does_not_keep_a_short_one_out(make_scene):
    """Whether a row is recent depends on its own sequence, not on who asks for room."""
    scene = make_scene(0, policy="lru")
    short, long = scene.sequence(64), scene.sequence(640)
    for sequence in (short, long):
        scene.pools.cover_hits(sequence.hits, 0, 640)
    scene.clip(20)
    scene.read(long, range(300, 320), 1)
    scene.read(short, range(10, 20), 2)
    assert scene.hot(short) == list(range(10, 20))


def test_hits_that_fade_are_learnt_of_hot_rows_that_are_not_selected(make_scene):
    scene = make_scene(0, policy="decayed")
    sequence = scene.sequence(640)
    scene.pools.cover_hits(sequence.hits, 0, 640)
    scene.clip(2)
    for step in range(1, 10):
        scene.read(sequence, [10, 11], step)
    for step in range(10, 16):
        scene.read(sequence, [20, 21], step)
    assert scene.hot(sequence) == [20, 21]


def test_hits_before_the_first_step_decide_what_gives_way(make_scene):
    """Rows are hot since they were written; what prefill queries select counts from then on."""
    scene = make_scene(0, policy="paper", alpha=0.01)
    sequence = scene.sequence(128)
    scene.pools.cover_hits(sequence.hits, 0, 128)
    scene.clip(64)
    positions = np.arange(64)
    source = content(sequence.rows(positions), SHAPE.row_bytes)
    scene.manager.offer_written(0, sequence, positions, source, 1)
    assert scene.manager.observed_queries == 16
    for _ in range(3):
        scene.manager.tally(0, sequence, np.arange(5, 15))
    scene.read(sequence, range(64, 90), 2)
    assert {*range(5, 15)} <= set(scene.hot(sequence))
    assert len({*range(64, 90)} & set(scene.hot(sequence))) == 26


@pytest.mark.parametrize("sizes", PoolSizes)
def test_memory_is_divided_by_misses_every_few_steps(make_scene, sizes):
    scene = make_scene(0, policy="lru", sizes=sizes)
    sequence = scene.sequence(640)
    for layer in range(SHAPE.layers):
        scene.pools.cover_hits(sequence.hits, layer, 640)
    scene.clip(40)
    for step in range(1, REDISTRIBUTION_STEPS + 1):
        scene.manager.begin_step(step)
        assert scene.pools.capacity(0) == 40 or step == REDISTRIBUTION_STEPS
        scene.read(sequence, range(step * 30, step * 30 + 20), step, layer=1)
        scene.read(sequence, range(5), step, layer=0)
    scene.manager.begin_step(REDISTRIBUTION_STEPS + 1)
    first, second = (scene.pools.capacity(layer) for layer in range(2))
    if sizes is PoolSizes.EQUAL:
        assert first == second == 40
    else:
        assert first < 40 < second
        assert first + second <= 80


def test_an_error_while_written_rows_are_offered_surfaces_once(make_scene):
    policy = BrokenPolicy()
    scene = make_scene(20, policy=policy)
    sequence = scene.sequence(128)
    positions = np.arange(64)
    source = content(sequence.rows(positions), SHAPE.row_bytes)
    policy.failures = 1
    offered = scene.manager.offer_written(0, sequence, positions, source, 1)
    assert isinstance(offered.exception(20), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError, match="a broken policy"):
        scene.pools.settle(0)
    scene.pools.promotions.settle_all()
    scene.manager.offer_written(0, sequence, positions, source, 1).result(20)
    assert len(scene.hot(sequence)) >= 20


def test_an_error_while_read_rows_are_offered_surfaces_at_the_next_step(make_scene):
    policy = BrokenPolicy()
    scene = make_scene(20, policy=policy)
    sequence = scene.sequence(128)
    entry, rows = LayerStep(1, 0, 128), sequence.rows(np.arange(3))
    scene.manager.tally(0, sequence, np.arange(3))
    policy.failures = 1
    source = content(rows, SHAPE.row_bytes)
    offered = scene.manager.offer_read(entry, sequence, np.arange(3), source, np.arange(3))
    assert isinstance(offered.exception(20), ZeroDivisionError)
    before = sequence.hits.counts[0].copy()
    with pytest.raises(ZeroDivisionError, match="a broken policy"):
        scene.manager.begin_in_place(0, sequence, np.arange(5), 2)
    np.testing.assert_array_equal(sequence.hits.counts[0], before)
    assert scene.hot(sequence) == []
    assert (entry.promoted, scene.counters.promoted_rows) == (0, 0)
    scene.read(sequence, range(5), 2)
    assert scene.hot(sequence) == list(range(5))
