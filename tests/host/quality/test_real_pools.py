# SPDX-License-Identifier: Apache-2.0
"""Pool policies on selections recorded from the real model."""

import pytest

from hillinfer.settings import PoolSizes, Settings
from hillinfer_bench.quality.forced_reading import selecting
from hillinfer_bench.replay.belady import demand_bound
from hillinfer_bench.replay.recording import record_selections
from hillinfer_bench.replay.table import replay_policy
from hillinfer_model.selection import kept_positions, selected_count

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("real-model-quality")]

LAST, QUERIES = 40, 16
CONTEXT = 1192 + LAST
SETTINGS = Settings().changed(alpha=0.2)


@pytest.fixture(scope="module")
def trace(real_model, real_ids, read_prefix):
    """What the real model selects in 40 steps."""
    ids = real_ids[0][:CONTEXT]
    assert read_prefix.tokens == CONTEXT - LAST
    with selecting(real_model):
        return record_selections(real_model, read_prefix, ids, SETTINGS, "pydoc", QUERIES)


def test_sets_are_those_of_decode_steps(trace, real_model):
    layers = real_model.config.num_hidden_layers
    assert (len(trace.layers), trace.steps, len(trace.observed[0])) == (layers, LAST, QUERIES)
    for first, traced in (
        (CONTEXT - LAST + 1, trace.layers),
        (CONTEXT - LAST - 15, trace.observed),
    ):
        for sets in traced:
            for length, positions in enumerate(sets, start=first):
                assert len(positions) == selected_count(length, 0.2, 36, None)
                assert positions[-1] == length - 1
                assert set(kept_positions(length, 4, 32)) <= set(positions.tolist())


def test_policies_in_order(trace):
    slots = selected_count(CONTEXT, 0.2, 36, None)
    rates = {
        name: replay_policy(trace, name, slots, PoolSizes.EQUAL).hit_rate
        for name in ("decayed", "lru", "recent")
    }
    assert rates["recent"] < rates["lru"] < demand_bound(trace, slots).hit_rate
    # Measured: within a point of each other, and a quarter above the most recent tokens.
    assert rates["decayed"] == pytest.approx(rates["lru"], abs=0.03)
    assert rates["decayed"] > rates["recent"] + 0.05
