# SPDX-License-Identifier: Apache-2.0
"""The hot pools of all layers stay inside what M0 leaves and give way to what else it must hold."""

import numpy as np
import pytest

from hillinfer.errors import BudgetError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.policies.least_recently_used import LeastRecentlyUsed
from hillinfer.pools.accountant import Accountant, Part
from hillinfer.pools.hot_pools import TABLE_GROWTH_ROWS, HotPools
from hillinfer.pools.slot_table import SLOT_BYTES

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


@pytest.fixture
def make_pools():
    def make(rows, sequences=1):
        accountant = Accountant(TABLES + sequences * TAIL + rows * SLOT)
        pools = HotPools(SHAPE, accountant, LeastRecentlyUsed())
        pools.cover(100)
        return accountant, pools

    return make


def admit(pools, layer, rows, step=1):
    rows = np.asarray(rows, np.int64)
    source = np.repeat(rows.astype(np.uint8)[:, None], SHAPE.row_bytes, axis=1)
    pools.admit(layer, rows, source, step)


def hot(pools, layer):
    return np.flatnonzero(pools.layers[layer].slots(np.arange(100)) >= 0).tolist()


def test_every_layer_has_the_same_share(make_pools):
    accountant, pools = make_pools(10)
    pools.take_tail()
    assert pools.capacity() == 10
    for layer in range(SHAPE.layers):
        admit(pools, layer, range(50))
        assert hot(pools, layer) == list(range(10))
    assert accountant.held()[Part.HOT] == TAIL + 10 * SLOT
    assert sum(accountant.held().values()) == accountant.budget_bytes


def test_a_tail_takes_the_place_of_hot_rows(make_pools):
    accountant, pools = make_pools(100)
    for layer in range(SHAPE.layers):
        admit(pools, layer, range(100))
    pools.take_tail()
    pools.take_tail()
    left = pools.capacity()
    assert left < 100
    assert [len(hot(pools, layer)) for layer in range(3)] == [left] * 3
    assert sum(accountant.held().values()) <= accountant.budget_bytes
    pools.give_tail()
    assert pools.capacity() > left


def test_what_else_must_be_held_takes_the_place_of_hot_rows(make_pools):
    accountant, pools = make_pools(50)
    pools.take_tail()
    for layer in range(SHAPE.layers):
        admit(pools, layer, range(50))
    accountant.take(Part.SHADOW, 20 * SLOT)
    assert [hot(pools, layer) for layer in range(3)] == [list(range(30))] * 3
    assert accountant.held()[Part.HOT] == TAIL + 30 * SLOT
    accountant.give(Part.SHADOW, 20 * SLOT)
    admit(pools, 0, range(60, 100), step=2)
    # The other layers may grow again too, but only when they have rows to admit.
    assert len(hot(pools, 0)) == 50
    assert len(hot(pools, 1)) == 30


def test_a_tail_that_does_not_fit_is_refused_and_not_counted(make_pools):
    accountant, pools = make_pools(0)
    pools.take_tail()
    before = accountant.held()
    for _ in range(2):
        with pytest.raises(BudgetError, match="raise --dram-budget"):
            pools.take_tail()
    assert accountant.held() == before
    assert pools.capacity() == 0
    pools.give_tail()
    pools.take_tail()


def test_forgetting_a_group_empties_its_slots_in_all_layers(make_pools):
    _, pools = make_pools(100)
    for layer in range(SHAPE.layers):
        admit(pools, layer, [1, 63, 64, 99])
    pools.forget_group(0)
    assert [hot(pools, layer) for layer in range(3)] == [[64, 99]] * 3


def test_tables_grow_in_steps_and_are_counted(make_pools):
    accountant = Accountant(10 * TABLES)
    pools = HotPools(SHAPE, accountant, LeastRecentlyUsed())
    assert accountant.held()[Part.OTHER] == 0
    pools.cover(1)
    pools.cover(TABLE_GROWTH_ROWS)
    assert accountant.held()[Part.OTHER] == TABLES
    pools.cover(TABLE_GROWTH_ROWS + 1)
    assert accountant.held()[Part.OTHER] == 2 * TABLES
