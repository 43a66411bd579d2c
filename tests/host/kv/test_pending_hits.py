# SPDX-License-Identifier: Apache-2.0
"""Pools that are told late what hits are rank as those that are told at once."""

import numpy as np
import pytest
from pool_cases import content

from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.hot_pools import HotPools, PendingHits
from hillinfer.kv.pool_manager import PoolManager
from hillinfer.kv.pool_policies import POOL_POLICIES, LayerShares, make_pool_policy
from hillinfer.kv.sequence import Sequence
from hillinfer.memory_budget import Accountant, Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import PoolSizes, Settings
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import LayerStep

SHAPE = ModelShape(
    layers=1,
    kv_heads=1,
    query_heads=1,
    head_dim=16,
    stored_type=StoredType.FLOAT16,
    max_positions=1000,
)
LENGTH, SHARED, SLOTS = 256, 128, 60


class ToldAtOnce(PendingHits):
    """What pools were before they were told late."""

    def note(self, layer, sequence, settled, length):
        super().note(layer, sequence, settled, length)
        self.tell(layer)


class OldOrder(PendingHits):
    """Twin: of shared rows it tells last what was noted first."""

    def _changed(self, layer, noted):
        return super()._changed(layer, noted)[::-1]


class NeverTold(PendingHits):
    """Twin: the pool goes on from what it knew."""

    def tell(self, layer):
        self._pending[layer] = {}


class Deaf(PendingHits):
    """Twin: counts change behind what was noted."""

    def tell_of(self, layer, sequence):
        pass


class HotPoolsTold(HotPools):
    """Hot pools that such hits are told to."""

    def __init__(self, hits, *given):
        super().__init__(*given)
        self.hits = hits(self.layers)


class Scene:
    """Three sequences of one layer; two of them share their first groups, or all do."""

    def __init__(self, policy, hits, third=(0, 1, 6, 7)):
        ranking = make_pool_policy(policy)
        accountant = Accountant((64 << 10) + SLOTS * (SHAPE.row_bytes + SLOT_BYTES))
        shares = LayerShares(1, PoolSizes.EQUAL)
        self.pools = HotPoolsTold(hits, SHAPE, accountant, ranking, shares)
        self.counters = Counters()
        chosen = Settings().changed(kept_sinks=1, kept_recent=2, alpha=0.02)
        self.manager = PoolManager(self.pools, ranking, chosen, self.counters)
        self.pools.cover(4096)
        self.sequences = [Sequence(1, SHAPE.row_bytes) for _ in range(3)]
        for sequence, own in zip(self.sequences, ([0, 1, 2, 3], [0, 1, 4, 5], third), strict=True):
            sequence.set_length(0, LENGTH, LENGTH // 64 * 64)
            sequence.append_groups(own)
            self.pools.cover_hits(sequence.hits, 0, LENGTH)
        # What is left is the slots'.
        rest = accountant.spare_bytes - SLOTS * (SHAPE.row_bytes + SLOT_BYTES)
        accountant.take(Part.STAGING, rest)
        self.accountant = accountant

    def read(self, number, positions, step):
        sequence, pool = self.sequences[number], self.pools.layers[0]
        self.manager.begin_in_place(0, sequence, positions, step)
        rows = sequence.rows(positions)
        (cold,) = (pool.slots(rows) < 0).nonzero()
        if len(cold):
            entry, source = LayerStep(step, 0, LENGTH), content(rows, SHAPE.row_bytes)
            self.manager.offer_read(entry, sequence, positions[cold], source, cold)
        self.pools.promotions.settle_all()

    def hot(self):
        return sorted(self.pools.layers[0].hot_rows.tolist())


def played(policy, hits):
    """Return what is hot after each of many steps, and what was moved."""
    scene, random, found = Scene(policy, hits), np.random.default_rng(6), []
    try:
        for step in range(1, 160):
            number = int(random.integers(3))
            if random.integers(3):
                # Rows that are hot already: nothing is ranked, what was learnt waits.
                sequence = scene.sequences[number]
                everything = np.arange(LENGTH)
                hot = everything[scene.pools.layers[0].slots(sequence.rows(everything)) >= 0]
                positions = np.sort(random.permutation(hot)[:20])
            else:
                positions = np.sort(random.choice(SHARED + 40, 30, replace=False))
            scene.read(number, positions, step)
            if not random.integers(8):
                # As what a prompt's last queries select: counted, and not noted.
                seen = np.sort(random.choice(SHARED, 20, replace=False))
                scene.manager.tally(0, scene.sequences[(number + 1) % 3], seen)
                scene.read(number, np.arange(step % 50, step % 50 + 10), step)
            if not random.integers(6):
                # Something else needs the memory of some slots for a moment.
                wanted = int(random.integers(20)) * (SHAPE.row_bytes + SLOT_BYTES)
                scene.accountant.take(Part.OTHER, wanted)
                scene.accountant.give(Part.OTHER, wanted)
            found.append(scene.hot())
    finally:
        scene.pools.close()
    return found, (scene.counters.promoted_rows, scene.counters.demoted_rows)


@pytest.mark.parametrize("policy", POOL_POLICIES)
def test_pools_told_late_hold_what_pools_told_at_once_hold(policy):
    late, at_once = played(policy, PendingHits), played(policy, ToldAtOnce)
    assert late == at_once
    assert late[1][1] > 50, "rows must have given way for others"


@pytest.mark.parametrize("twin", [OldOrder, NeverTold, Deaf])
def test_the_comparison_sees_hits_that_are_told_wrongly(twin):
    assert any(played(policy, twin) != played(policy, ToldAtOnce) for policy in POOL_POLICIES)


def test_nothing_is_told_while_all_that_is_selected_is_hot():
    told = []

    class Noted(PendingHits):
        def tell(self, layer):
            told.extend(self._pending[layer])
            super().tell(layer)

    scene = Scene("decayed", Noted)
    try:
        scene.read(0, np.arange(30), 1)
        told.clear()
        for step in range(2, 6):
            scene.read(0, np.arange(20), step)
        assert told == []
        scene.read(0, np.arange(20, 40), 6)
        assert len(told) == 1
    finally:
        scene.pools.close()


class Hearing:
    """A pool of which is noted what fades it is told of."""

    def __init__(self, pool, own):
        self._pool, self._own = pool, own

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def refresh(self, layer, sequence, settled, length, fades=0):
        self._own.fades[self._own.scene.sequences.index(sequence)] = fades
        self._pool.refresh(layer, sequence, settled, length, fades)


class Idling:
    """Three sequences of one layer, and the fades that the pool is told of each."""

    def __init__(self, policy="decayed"):
        own, self.step, self.fades = self, 0, {}

        class Heard(PendingHits):
            def __init__(self, pools):
                super().__init__([Hearing(one, own) for one in pools])

        self.scene = Scene(policy, Heard, third=(6, 7, 8, 9))

    def take(self, *numbers):
        """Let sequences take steps, each of which ranks."""
        for number in numbers:
            self.read(number, np.arange(130, 150) + (self.step + 1) % 2 * 20)
        return self.fades

    def read(self, number, positions):
        """Let a sequence take a step with these rows."""
        self.step += 1
        self.scene.read(number, positions, self.step)
        self.scene.pools.hits.tell(0)


@pytest.fixture
def idling():
    made = []

    def make(*given):
        made.append(Idling(*given))
        return made[-1]

    yield make
    for one in made:
        one.scene.pools.close()


def test_hits_of_an_idle_sequence_fade_by_rounds_of_the_others(idling):
    own = idling()
    own.take(0, 1)
    assert own.take(*[1] * 8) == {0: 4, 1: 0}
    # Of two that take turns a step each is a round.
    assert own.take(*[1, 2] * 7)[0] == 5
    assert own.take(0)[0] == 0
    # Those of the others begin to: who stepped last is asked of one other.
    assert own.take(*[0] * 4) == {0: 0, 1: 1, 2: 2}
    assert own.take(*[0] * 200) == {0: 0, 1: 40, 2: 40}


def test_no_hits_fade_while_sequences_take_turns_by_single_steps(idling):
    own = idling()
    for _ in range(20):
        own.take(0, 1, 2)
        assert not any(own.fades.values())


def test_hits_that_have_faded_do_not_come_back_when_another_document_steps(idling):
    own = idling()
    own.take(0)
    assert own.take(*[1] * 40) == {0: 19, 1: 0}
    # One step of the third makes two others of one, and half as many rounds.
    for number in [2, 1] * 20:
        assert own.take(number)[0] == 19
    assert own.take(2, 1, 2)[0] == 20


def test_a_document_that_is_closed_takes_part_in_no_round(idling):
    own = idling()
    own.take(0, 1, 2, 1, 2, 1)
    assert own.fades[0] == 0
    own.scene.pools.hits.forget(own.scene.sequences[2])
    # There were two rounds of five steps, and no others by then.
    assert own.take(1)[0] == 1
    assert own.take(1, 1)[0] == 2


def test_of_shared_rows_the_hits_noted_last_count_whoever_fades(idling):
    own, shared = idling(), np.arange(20)
    pool, sequences = own.scene.pools.layers[0], own.scene.sequences
    own.read(0, shared)
    for _ in range(20):
        own.read(1, shared)
        own.take(2, 2)
        slots = pool.slots(sequences[1].rows(shared))
        is_hot = slots >= 0
        assert is_hot.any()
        wanted = sequences[1].hits.counts[0][shared][is_hot]
        assert pool.columns.counts[slots[is_hot]].tolist() == wanted.tolist()
    assert own.fades[0] > 5


@pytest.mark.parametrize("policy", ["lru", "counts", "paper", "recent"])
def test_hits_that_do_not_fade_stay(policy, idling):
    own = idling(policy)
    own.take(0, 1)
    assert not any(own.take(*[1] * 30).values())
