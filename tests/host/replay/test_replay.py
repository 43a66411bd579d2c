# SPDX-License-Identifier: Apache-2.0
"""Replaying a trace through the product's pools."""

from dataclasses import replace

import numpy as np
import pytest
from replay_cases import random_trace

from hillinfer.kv.pool_policies import POOL_POLICIES, PoolPolicy
from hillinfer.settings import PoolSizes
from hillinfer_bench.replay.belady import demand_bound, prefetch_bound, shared_demand_bound
from hillinfer_bench.replay.pool_replay import PoolReplay
from hillinfer_bench.replay.table import (
    ALL_TEXTS,
    DEMAND,
    EQUAL,
    MISSES,
    POOL_ALPHAS,
    PREFETCH,
    SHARED,
    means,
    pool_rows,
    replay_policy,
)

TRACE = random_trace()
GROUP = 64
# The last set's size, and pools of half, all and twice of it.
SET = 114
SLOTS = (25, 82, 196)


@pytest.mark.parametrize("name", POOL_POLICIES)
@pytest.mark.parametrize("slots", SLOTS)
def test_no_policy_beats_belady(name, slots):
    for trace in (TRACE, random_trace(seed=1, prefix=1037)):
        found = replay_policy(trace, name, slots, PoolSizes.EQUAL)
        best = demand_bound(trace, slots)
        assert (found.hits <= best.hits).all()
        assert (found.selected == best.selected).all()
        assert (found.in_open_group == best.in_open_group).all()
        assert (found.hits - found.in_open_group).sum() > 0
        by_misses = replay_policy(trace, name, slots, PoolSizes.MISSES)
        assert by_misses.hits.sum() <= shared_demand_bound(trace, slots).hits.sum()


def test_the_bound_is_tight_enough_to_be_broken():
    found = replay_policy(TRACE, "lru", SLOTS[2], PoolSizes.EQUAL)
    assert (found.hits > demand_bound(TRACE, SLOTS[1]).hits).all()


def test_a_pool_for_all_rows_misses_nothing():
    found = replay_policy(TRACE, "lru", 1200, PoolSizes.EQUAL)
    assert found.hit_rate == found.settled_hit_rate == 1.0
    assert not found.promoted.any()
    assert replay_policy(TRACE, "lru", SLOTS[2], PoolSizes.EQUAL).hit_rate < 1.0


def test_no_slots_leave_the_open_group():
    found = replay_policy(TRACE, "lru", 0, PoolSizes.EQUAL)
    expected = [
        sum(
            int((positions >= (TRACE.prefix + step + 1) // GROUP * GROUP).sum())
            for step, positions in enumerate(sets)
        )
        for sets in TRACE.layers
    ]
    assert found.hits.tolist() == found.in_open_group.tolist() == expected
    assert found.settled_hit_rate == 0.0
    assert sum(expected) > 0


def test_volumes_are_equal_where_the_pool_is_full():
    found = replay_policy(TRACE, "lru", SLOTS[1], PoolSizes.EQUAL)
    assert found.promoted.sum() > 0
    assert found.promoted.tolist() == found.demoted.tolist()


def test_hits_of_a_trace_by_hand():
    """With room for two of three rows the one that was used last stays."""
    settings = TRACE.settings.changed(kept_sinks=0, kept_recent=1)
    sets = ([0, 1], [0, 2], [0, 1], [0, 2])
    layer = tuple(np.array(one, np.int32) for one in sets)
    trace = replace(TRACE, settings=settings, prefix=GROUP, layers=(layer,), observed=((),))
    pool = PoolReplay(trace, POOL_POLICIES["lru"](), 2, PoolSizes.EQUAL).run()
    # The newest two rows of the prefix at first, so both miss; then 0 hits, and 1 and 2 take turns.
    assert (int(pool.hits[0]), int(pool.promoted[0])) == (3, 5)
    # The twin: where neither gives way, nothing else is hit.
    assert PoolReplay(trace, Nothing(), 2, PoolSizes.EQUAL).run().hits[0] == 0


class Nothing(PoolPolicy):
    """Prefers what is in the pool first: the newest rows of the prefix."""

    def worth(self, rows):
        return rows.positions.astype(np.int64)


def test_first_hits_of_observed_queries_count():
    unseen = replace(TRACE, observed=((),) * len(TRACE.layers))
    for name, differs in (("paper", True), ("lru", False)):
        seen, not_seen = (
            replay_policy(trace, name, SLOTS[2], PoolSizes.EQUAL) for trace in (TRACE, unseen)
        )
        assert (seen.hits.tolist() != not_seen.hits.tolist()) is differs


def test_prefetching_holds_a_whole_set_or_as_much_as_fits():
    assert prefetch_bound(TRACE, SET) == 1.0
    assert prefetch_bound(TRACE, SET // 2) == pytest.approx(0.5, abs=0.02)


def test_rows_of_a_trace():
    rows = pool_rows(TRACE)
    assert [row.pool_alphas for row in rows] == [size for size in POOL_ALPHAS for _ in range(9)]
    expected = [
        *((name, EQUAL) for name in POOL_POLICIES),
        ("decayed", MISSES),
        (DEMAND, EQUAL),
        (DEMAND, SHARED),
        (PREFETCH, EQUAL),
    ]
    assert [(row.policy, row.sizes) for row in rows[:9]] == expected
    assert [row.pool_rows for row in rows[::9]] == list(SLOTS)
    for row in rows:
        assert row.worst_layer_hit_rate <= row.hit_rate <= 1.0
        assert (row.promoted_rows is None) == (row.policy in (DEMAND, PREFETCH))


def test_means_over_texts():
    one, other = (pool_rows(random_trace(seed=seed, steps=8, text=str(seed))) for seed in (0, 1))
    both = means([*one, *other])
    assert len(both) == len(one)
    for mean, row, again in zip(both, one, other, strict=True):
        assert mean.text == ALL_TEXTS
        assert mean.policy == row.policy == again.policy
        assert mean.hit_rate == pytest.approx((row.hit_rate + again.hit_rate) / 2)
        worst = min(row.worst_layer_hit_rate, again.worst_layer_hit_rate)
        assert mean.worst_layer_hit_rate == worst
    assert any(row.hit_rate != mean.hit_rate for row, mean in zip(one, both, strict=True))
