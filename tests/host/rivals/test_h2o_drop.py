# SPDX-License-Identifier: Apache-2.0
"""Dropped tokens never come back; what is held is attended to, and counted to the byte."""

from dataclasses import replace

import pytest
import torch
from rival_cases import MULTI_HEAD, SCALING, SHAPE, Run, make_setup

from hillinfer.errors import BudgetError, CacheUseError
from hillinfer.model_shape import StoredType
from hillinfer_bench.rivals.table import make_rival
from hillinfer_model.selection import selected_count

NAME = "h2o-drop"


def held_bytes(setup):
    """The formula of the page."""
    shape = setup.shape
    slots = selected_count(setup.context, setup.alpha, setup.kept_tokens, None) + 1
    slot = 2 * 2 * shape.head_dim + 4 + 4
    return setup.units * shape.kv_heads * slots * slot + 4 * shape.query_heads * slots


def held(run, layer, row):
    return [set(head.tolist()) for head in run.rival.positions(layer, row)]


def visible(run, sets):
    seen = torch.zeros(run.setup.shape.query_heads, 1, run.length, dtype=torch.bool)
    for head, positions in enumerate(sets):
        group = run.setup.shape.group_size
        seen[head * group : (head + 1) * group, 0, sorted(positions)] = True
    return seen


@pytest.mark.parametrize("shape", [SHAPE, replace(MULTI_HEAD, stored_type=StoredType.BFLOAT16)])
def test_everything_selected_is_full_attention(cold_dir, shape):
    run = Run(NAME, make_setup(cold_dir, shape, alpha=1.0, block_rows=50), 300)
    for _ in range(5):
        assert run.error(run.step()) < 1e-4


@pytest.mark.parametrize("observed", [0, 8])
def test_what_was_dropped_never_comes_back(cold_dir, observed):
    run = Run(NAME, make_setup(cold_dir, alpha=0.15), 400, observed=observed)
    run.step()
    before = {unit: held(run, *unit) for unit in run.units()}
    for _ in range(60):
        new = run.length
        found = run.step()
        for unit in run.units():
            now = held(run, *unit)
            # Attention saw what was held and the new token, before one of them was dropped.
            seen = [positions | {new} for positions in before[unit]]
            exact = run.exact(*unit, visible(run, seen))
            assert (found[unit].double() - exact).abs().max() < 1e-4
            assert (found[unit].double() - run.exact(*unit)).abs().max() > 1e-3
            chosen = selected_count(run.length, 0.15, 36, None)
            for old, head in zip(seen, now, strict=True):
                assert head <= old
                assert len(head) == chosen
                assert {*range(4), *range(run.length - 32, run.length)} <= head
            before[unit] = now
    assert any(one != before[unit][0] for unit in run.units() for one in before[unit])


def test_the_heaviest_of_the_observed_stay(cold_dir):
    observed = 6
    run = Run(NAME, make_setup(cold_dir, batch=1), 400, observed=observed)
    for layer, row in run.units():
        queries = run.queries[layer, row, :, 400 - observed : 400].double()
        keys = run.keys[layer, row, :, :400].double().repeat_interleave(2, 0)
        scores = queries @ keys.transpose(1, 2) * SCALING
        future = torch.ones(observed, 400, dtype=torch.bool).triu(400 - observed + 1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1).sum(1).view(2, 2, -1).sum(1)
        weights[:, :4] = weights[:, -32:] = torch.inf
        chosen = selected_count(400, 0.2, 36, None)
        expected = [set(head.tolist()) for head in weights.topk(chosen).indices]
        assert held(run, layer, row) == expected
        assert expected[0] != expected[1]


def test_the_lightest_goes(cold_dir):
    run = Run(NAME, make_setup(cold_dir, batch=1, alpha=0.15), 400)
    before = held(run, 0, 0)
    weights = run.rival.weights[0, 0]
    places = run.rival.positions(0, 0).tolist()
    # A weight so far below all others that one step cannot lift it.
    victims = [next(p for p in sorted(head) if 50 < p < 300) for head in before]
    weights[:, : len(places[0])] += 100
    for head, victim in enumerate(victims):
        weights[head, places[head].index(victim)] = 0
    # k grows with the length now and then, and then nobody leaves.
    for _ in range(8):
        run.step()
    for head, victim in enumerate(victims):
        assert victim not in held(run, 0, 0)[head]


def test_a_changed_value_is_seen(cold_dir):
    run = Run(NAME, make_setup(cold_dir, alpha=1.0), 300)
    run.rival.values[1, 1, 0, 30, 3] += 40
    found = run.step()
    assert run.wrong(found, 1, 1)
    assert not run.wrong(found, 1, 0)


@pytest.mark.parametrize(("alpha", "batch", "context"), [(0.2, 2, 1000), (0.5, 1, 600)])
def test_bytes_are_the_formula(cold_dir, alpha, batch, context):
    setup = make_setup(cold_dir, alpha=alpha, batch=batch, context=context)
    setup = replace(setup, budget_bytes=held_bytes(setup))
    run = Run(NAME, setup, 400)
    layer_bytes = 2 * 2 * SHAPE.kv_heads * 400 * SHAPE.head_dim
    for _ in range(3):
        run.step()
        traffic = run.rival.traffic()
        assert traffic.dram_bytes == held_bytes(setup)
        # One layer of one sequence at a time is whole until it was observed.
        assert traffic.dram_peak_bytes == held_bytes(setup) + layer_bytes
        assert traffic.drive_read_bytes == traffic.drive_write_bytes == 0
    with pytest.raises(BudgetError, match="too small for this rival"):
        make_rival(NAME, replace(setup, budget_bytes=held_bytes(setup) - 1))


def test_a_prompt_cannot_grow_after_it_was_cut(cold_dir):
    run = Run(NAME, make_setup(cold_dir), 300)
    states = run.keys[0, 0, :, 300:310]
    with pytest.raises(CacheUseError, match="dropped tokens already"):
        run.rival.fill(0, 0, states, states)


def test_steps_without_attention_stay_within_the_slots(cold_dir):
    run = Run(NAME, make_setup(cold_dir, context=500), 490)
    for at in range(490, 500):
        new = slice(at, at + 1)
        run.rival.append(0, 0, run.keys[0, 0, :, new], run.values[0, 0, :, new])
    assert {499, 490, 0} <= held(run, 0, 0)[0]
