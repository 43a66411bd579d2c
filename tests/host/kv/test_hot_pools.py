# SPDX-License-Identifier: Apache-2.0
"""The hot pools of all layers stay inside what M0 leaves and give way to what else it must hold."""

import platform
import threading
from pathlib import Path

import numpy as np
import pytest
from pool_cases import at, candidates, content

from hillinfer.errors import BudgetError
from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_policies import LayerShares, LeastRecentlyUsed, PoolPolicy
from hillinfer.kv.sequence import Sequence
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import PoolSizes

SHAPE = ModelShape(
    layers=3,
    kv_heads=1,
    query_heads=1,
    head_dim=16,
    stored_type=StoredType.FLOAT16,
    max_positions=1000,
)
SLOT = SHAPE.layers * (SHAPE.row_bytes + SLOT_BYTES)
TAIL = 64 * SHAPE.token_bytes
TABLES = SHAPE.layers * 4 * TABLE_GROWTH_ROWS
ROWS = 200
# The most that anything waits, in seconds, however busy the machine.
ENOUGH = 60


class Gate(LeastRecentlyUsed):
    """Ranks once it is let, or raises: what a slow and a broken policy do to the others."""

    def __init__(self):
        self.opened = threading.Event()
        self.opened.set()
        self.entered = threading.Event()
        self.failures = 0

    def worth(self, rows):
        self.entered.set()
        assert self.opened.wait(ENOUGH)
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError("a broken policy")
        return super().worth(rows)


@pytest.fixture
def make_pools():
    made = []

    def make(rows, sequences=1, sizes=PoolSizes.EQUAL, policy=None):
        accountant = Accountant(TABLES + sequences * TAIL + rows * SLOT)
        shares = LayerShares(SHAPE.layers, sizes)
        pools = HotPools(SHAPE, accountant, policy or LeastRecentlyUsed(), shares)
        pools.cover(ROWS)
        made.append(pools)
        return accountant, pools

    yield make
    for pools in made:
        pools.close()


def promote(pools, layer, rows, step=1, done=lambda moved: None):
    offered = candidates(rows, SHAPE.row_bytes)
    return pools.promote(layer, offered, at(step), step + 1, done)


def hot(pools, layer):
    """Return the hot rows of a layer, each of which holds its own bytes."""
    pools.settle(layer)
    pool = pools.layers[layer]
    slots = pool.slots(np.arange(ROWS))
    rows = np.flatnonzero(slots >= 0)
    np.testing.assert_array_equal(pool.columns.data[slots[rows]], content(rows, SHAPE.row_bytes))
    return rows.tolist()


def test_every_layer_has_the_same_share(make_pools):
    accountant, pools = make_pools(10)
    pools.take_tail()
    for layer in range(SHAPE.layers):
        assert pools.capacity(layer) == 10
        promote(pools, layer, range(50))
        assert hot(pools, layer) == list(range(40, 50))
    assert accountant.held()[Part.HOT] == TAIL + 10 * SLOT
    assert sum(accountant.held().values()) == accountant.budget_bytes


def test_a_tail_takes_the_place_of_hot_rows(make_pools):
    accountant, pools = make_pools(100)
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(100))
    pools.take_tail()
    pools.take_tail()
    left = pools.capacity(0)
    assert left < 100
    assert [hot(pools, layer) for layer in range(3)] == [list(range(100 - left, 100))] * 3
    assert sum(accountant.held().values()) <= accountant.budget_bytes
    pools.give_tail()
    assert pools.capacity(0) > left


def test_what_else_must_be_held_takes_the_place_of_hot_rows(make_pools):
    accountant, pools = make_pools(50)
    pools.take_tail()
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(50))
    accountant.take(Part.SHADOW, 20 * SLOT)
    assert [hot(pools, layer) for layer in range(3)] == [list(range(20, 50))] * 3
    assert accountant.held()[Part.HOT] == TAIL + 30 * SLOT
    accountant.give(Part.SHADOW, 20 * SLOT)
    promote(pools, 0, range(60, 100), step=2)
    # The other layers may grow again too, but only when they have rows to promote.
    assert len(hot(pools, 0)) == 50
    assert len(hot(pools, 1)) == 30


def test_a_layer_that_grew_while_others_had_nothing_gives_the_rest_back(make_pools):
    accountant, pools = make_pools(50)
    pools.take_tail()
    promote(pools, 0, range(50))
    # Nobody has to give way yet, but each layer may have 30 slots only from now on.
    accountant.take(Part.SHADOW, 20 * SLOT)
    assert len(hot(pools, 0)) == 50
    promote(pools, 1, range(30))
    promote(pools, 2, range(30))
    assert [len(hot(pools, layer)) for layer in range(3)] == [30, 30, 30]
    assert sum(accountant.held().values()) == accountant.budget_bytes


def test_large_pools_give_a_little_more_than_was_wanted(make_pools):
    """So many small wants in turn rank all rows once; memory that came back is used again."""
    accountant, pools = make_pools(192)
    pools.take_tail()
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(ROWS))
    assert [len(hot(pools, layer)) for layer in range(3)] == [192] * 3
    shrunk = []
    for _ in range(4):
        before = [pool.used_rows for pool in pools.layers]
        accountant.take(Part.SHADOW, SLOT)
        now = [pool.used_rows for pool in pools.layers]
        shrunk += [after for was, after in zip(before, now, strict=True) if after < was]
        for layer in range(SHAPE.layers):
            promote(pools, layer, range(ROWS), step=2)
    # A 64th of what was left, rounded down, on top of the one that was wanted; twice in four times.
    assert shrunk == [189] * 3 + [186] * 3
    assert [len(hot(pools, layer)) for layer in range(3)] == [186] * 3
    accountant.give(Part.SHADOW, 4 * SLOT)
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(ROWS), step=3)
    assert [len(hot(pools, layer)) for layer in range(3)] == [192] * 3
    assert sum(accountant.held().values()) == accountant.budget_bytes


def test_a_tail_that_does_not_fit_is_refused_and_not_counted(make_pools):
    accountant, pools = make_pools(0)
    pools.take_tail()
    before = accountant.held()
    for _ in range(2):
        with pytest.raises(BudgetError, match="raise --dram-budget"):
            pools.take_tail()
    assert accountant.held() == before
    assert pools.capacity(0) == 0
    pools.give_tail()
    pools.take_tail()


def test_forgetting_a_group_empties_its_slots_in_all_layers(make_pools):
    _, pools = make_pools(100)
    for layer in range(SHAPE.layers):
        promote(pools, layer, [1, 63, 64, 99])
    pools.forget_group(0)
    assert [hot(pools, layer) for layer in range(3)] == [[64, 99]] * 3


def test_tables_grow_in_steps_and_are_counted():
    accountant = Accountant(10 * TABLES)
    shares = LayerShares(SHAPE.layers, PoolSizes.EQUAL)
    pools = HotPools(SHAPE, accountant, LeastRecentlyUsed(), shares)
    assert accountant.held()[Part.OTHER] == 0
    pools.cover(1)
    pools.cover(TABLE_GROWTH_ROWS)
    assert accountant.held()[Part.OTHER] == TABLES
    pools.cover(TABLE_GROWTH_ROWS + 1)
    assert accountant.held()[Part.OTHER] == 2 * TABLES
    pools.close()


def test_hit_rate_tables_are_counted_as_they_grow(make_pools):
    accountant, pools = make_pools(50)
    before = accountant.held()[Part.OTHER]
    hits = Sequence(SHAPE.layers, SHAPE.row_bytes).hits
    for layer, tokens in ((0, 1), (0, 1024), (1, 1500), (0, 3000), (0, 10)):
        pools.cover_hits(hits, layer, tokens)
        assert accountant.held()[Part.OTHER] == before + hits.byte_count


def test_a_growing_hit_rate_table_is_counted_beside_the_old_one():
    accountant = Accountant(10_000)
    shares = LayerShares(SHAPE.layers, PoolSizes.EQUAL)
    pools = HotPools(SHAPE, accountant, LeastRecentlyUsed(), shares)
    hits = Sequence(SHAPE.layers, SHAPE.row_bytes).hits
    pools.cover_hits(hits, 0, 1024)
    pools.cover_hits(hits, 0, 1025)
    assert accountant.held()[Part.OTHER] == 2 * 2048
    assert accountant.peak()[Part.OTHER] == 3 * 2048
    pools.close()


def test_layers_with_more_misses_get_more(make_pools):
    accountant, pools = make_pools(30, sizes=PoolSizes.MISSES)
    pools.take_tail()
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(90))
    assert [len(hot(pools, layer)) for layer in range(3)] == [30] * 3
    pools.redistribute(np.array([300, 0, 0]))
    assert [pools.capacity(layer) for layer in range(3)] == [60, 15, 15]
    assert [len(hot(pools, layer)) for layer in range(3)] == [30, 15, 15]
    promote(pools, 0, range(100, 190), step=2)
    assert len(hot(pools, 0)) == 60
    assert sum(accountant.held().values()) == accountant.budget_bytes


def test_equal_pools_stay_as_they_are_whatever_is_missed(make_pools):
    _, pools = make_pools(30)
    pools.take_tail()
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(90))
    pools.redistribute(np.array([300, 0, 0]))
    assert [len(hot(pools, layer)) for layer in range(3)] == [30] * 3


# --- in the background ---------------------------------------------------------------------


def test_promotion_goes_on_while_the_caller_computes(make_pools):
    policy = Gate()
    accountant, pools = make_pools(20, policy=policy)
    pools.take_tail()
    policy.opened.clear()
    moved = []
    under_way = promote(pools, 1, range(30), done=moved.append)
    assert policy.entered.wait(ENOUGH)
    assert not under_way.done()
    # Memory is taken before the thread starts, and what it will promote is not hot yet.
    assert accountant.held()[Part.HOT] == TAIL + 20 * SLOT // SHAPE.layers
    assert (pools.layers[1].slots(np.arange(ROWS)) < 0).all()
    told = []
    pools.promotions.when_settled(1, lambda: told.append(list(moved)))
    assert told == []
    policy.opened.set()
    pools.promotions.settle_all()
    assert moved == [(20, 0)] == [under_way.result()]
    assert hot(pools, 1) == list(range(10, 30))
    pools.close()
    assert told == [[(20, 0)]], "told after the rows have moved"


def test_nothing_under_way_is_told_at_once(make_pools):
    _, pools = make_pools(20)
    told = []
    pools.promotions.when_settled(0, lambda: told.append(1))
    assert told == [1]


def test_an_error_after_a_promotion_surfaces_at_a_later_use(make_pools):
    policy = Gate()
    _, pools = make_pools(20, policy=policy)
    policy.opened.clear()
    promote(pools, 0, range(30))

    def done():
        raise ZeroDivisionError("a broken policy")

    pools.promotions.when_settled(0, done)
    policy.opened.set()
    # The thread is joined here, so what `done` raised is known afterwards.
    pools.close()
    with pytest.raises(ZeroDivisionError):
        pools.settle(0)
    pools.settle(0)


def test_memory_given_up_meanwhile_waits_for_the_thread(make_pools):
    policy = Gate()
    accountant, pools = make_pools(20, policy=policy)
    policy.opened.clear()
    promote(pools, 0, range(30))
    assert policy.entered.wait(ENOUGH)
    taking = threading.Thread(target=accountant.take, args=(Part.SHADOW, TAIL + 15 * SLOT))
    taking.start()
    taking.join(0.1)
    policy.opened.set()
    taking.join(ENOUGH)
    assert len(hot(pools, 0)) <= 20
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(30, 60), step=2)
        assert len(hot(pools, layer)) == 5
    assert sum(accountant.held().values()) == accountant.budget_bytes


@pytest.mark.parametrize(
    "use",
    [
        lambda pools: pools.settle(1),
        lambda pools: pools.promotions.settle_all(),
        lambda pools: promote(pools, 1, [7], step=3),
    ],
    ids=["settle", "settle all", "promote"],
)
def test_an_error_in_the_background_surfaces_once_at_the_next_use(make_pools, use):
    policy = Gate()
    accountant, pools = make_pools(20, policy=policy)
    promote(pools, 1, range(10))
    pools.promotions.settle_all()
    held = accountant.held()
    policy.failures = 1
    promote(pools, 1, range(5, 15), step=2).exception(ENOUGH)
    with pytest.raises(ZeroDivisionError, match="a broken policy"):
        use(pools)
    pools.promotions.settle_all()
    # Nothing was lost: slots that were taken for it stay free, and it works again.
    assert hot(pools, 1) == list(range(10))
    promote(pools, 1, range(5, 15), step=3)
    assert hot(pools, 1) == list(range(15))
    assert accountant.held()[Part.HOT] >= held[Part.HOT]


def test_whoever_gives_up_groups_or_memory_is_not_stopped_by_an_error(make_pools):
    policy = Gate()
    _, pools = make_pools(20, policy=policy)
    for layer in range(SHAPE.layers):
        promote(pools, layer, [1, 2, 70])
    pools.promotions.settle_all()
    policy.failures = 1
    promote(pools, 0, [3], step=2).exception(ENOUGH)
    pools.forget_group(0)
    pools.cover(TABLE_GROWTH_ROWS)
    pools.take_tail()
    with pytest.raises(ZeroDivisionError):
        pools.settle(1)
    assert [hot(pools, layer) for layer in range(3)] == [[70]] * 3


def test_after_an_error_the_others_are_waited_for_too(make_pools):
    policy = Gate()
    _, pools = make_pools(20, policy=policy)
    policy.failures = 1
    promote(pools, 0, [1]).exception(ENOUGH)
    policy.opened.clear()
    policy.entered.clear()
    under_way = promote(pools, 1, [1])
    assert policy.entered.wait(ENOUGH)
    threading.Timer(0.2, policy.opened.set).start()
    pools.forget_group(0)
    assert under_way.done()
    with pytest.raises(ZeroDivisionError):
        pools.settle(0)


def test_nothing_is_waited_for_after_close(make_pools):
    policy = Gate()
    _, pools = make_pools(20, policy=policy)
    policy.opened.clear()
    under_way = [promote(pools, layer, range(5)) for layer in range(SHAPE.layers)]
    assert policy.entered.wait(ENOUGH)
    # The first goes on only after the last was called off.
    under_way[-1].add_done_callback(lambda _: policy.opened.set())
    pools.close()
    assert [exchange.cancelled() for exchange in under_way] == [False, True, True]
    waiting = threading.Thread(target=pools.wait, daemon=True)
    waiting.start()
    waiting.join(ENOUGH)
    assert not waiting.is_alive()
    pools.promotions.settle_all()
    pools.forget_group(0)


def test_whoever_waits_while_it_is_closed_is_let_go(make_pools):
    policy = Gate()
    _, pools = make_pools(20, policy=policy)
    policy.opened.clear()
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(5))
    assert policy.entered.wait(ENOUGH)
    waiting = [
        threading.Thread(target=wait, daemon=True)
        for wait in (pools.wait, pools.promotions.settle_all)
    ]
    for thread in waiting:
        thread.start()
    threading.Timer(0.2, policy.opened.set).start()
    pools.close()
    for thread in waiting:
        thread.join(ENOUGH)
        assert not thread.is_alive()


def test_a_policy_that_raises_while_memory_is_taken_leaves_the_sum_as_it_was(make_pools):
    policy = Gate()
    accountant, pools = make_pools(20, policy=policy)
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(20))
    pools.promotions.settle_all()
    held = accountant.held()
    policy.failures = 1
    with pytest.raises(ZeroDivisionError):
        accountant.take(Part.SHADOW, TAIL + SLOT)
    assert accountant.held() == held
    accountant.take(Part.SHADOW, TAIL + SLOT)
    assert [len(hot(pools, layer)) for layer in range(3)] == [19] * 3


class Distrustful(PoolPolicy):
    """Notes the thread that ranks."""

    def __init__(self):
        self.threads = set()

    def worth(self, rows):
        self.threads.add(threading.current_thread().name)
        return super().worth(rows)


def test_ranking_for_promotion_is_no_matter_of_the_calling_thread(make_pools):
    policy = Distrustful()
    _, pools = make_pools(5, policy=policy)
    for layer in range(SHAPE.layers):
        promote(pools, layer, range(9))
    pools.promotions.settle_all()
    assert all(name.startswith("hillinfer-pool") for name in policy.threads)
    assert policy.threads


def test_address_space_for_growth_is_taken_as_far_as_it_goes():
    """More than any processor addresses, of which nothing is touched."""
    shares = LayerShares(SHAPE.layers, PoolSizes.EQUAL)
    accountant = Accountant(TABLES + TAIL + ROWS * SLOT)
    pools = HotPools(SHAPE, accountant, LeastRecentlyUsed(), shares, most_bytes=1 << 60)
    pools.take_tail()
    small = pools.capacity(0)
    accountant.raise_to(TABLES + TAIL + 100 * ROWS * SLOT)
    assert pools.capacity(0) > 50 * small
    pools.close()


def test_a_budget_that_cannot_be_addressed_is_refused_in_a_line():
    shares = LayerShares(SHAPE.layers, PoolSizes.EQUAL)
    with pytest.raises(BudgetError, match=r"does not let .* of memory be reserved .*ulimit -v"):
        HotPools(SHAPE, Accountant(1 << 60), LeastRecentlyUsed(), shares)


def resident_bytes():
    (line,) = (
        one for one in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in one
    )
    return int(line.split()[1]) << 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize("rows", [16_384 - TABLE_GROWTH_ROWS, 16_384])
def test_the_heap_keeps_nothing_that_is_free_while_tables_grow(rows):
    accountant = Accountant(64 << 20)
    shares = LayerShares(SHAPE.layers, PoolSizes.EQUAL)
    pools = HotPools(SHAPE, accountant, LeastRecentlyUsed(), shares)
    pools.cover(1)
    # Pieces of the heap between others that stay.
    pieces = [bytearray(b"1" * 100_000) for _ in range(1500)]
    before = resident_bytes()
    pieces = pieces[::10]
    freed = before - resident_bytes()
    pools.cover(rows)
    given = before - resident_bytes() - freed
    pools.close()
    assert len(pieces) == 150
    if rows < 16_384:
        # The twin: the allocator itself gives nothing back.
        assert given < 50 << 20
    else:
        assert freed + given > 100 << 20
