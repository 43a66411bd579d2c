# SPDX-License-Identifier: Apache-2.0
"""Selection by all keys: right, within the budget, and counted to the byte."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference_pool import ReferencePool, pages, scatter_bytes, spilled, wire_bytes
from rival_cases import MULTI_HEAD, PAPER, SCALING, SHAPE, WIDE, Run, flip_on_drive, make_setup

from hillinfer.errors import BudgetError
from hillinfer.model_shape import StoredType
from hillinfer_bench.rivals.drive_rows import piece_counts, piece_units
from hillinfer_bench.rivals.table import make_rival
from hillinfer_model.selection import selected_count

NAME = "h2o-all-keys"


def half_bytes(shape):
    return -(-2 * shape.kv_heads * shape.head_dim // 64) * 64


def fixed_bytes(setup):
    """The formula of the page for what is held besides keys and values."""
    shape, half = setup.shape, half_bytes(setup.shape)
    region = -(-setup.context // 64) * 64
    tails = setup.units * pages((64 + setup.kept_recent) * shape.row_bytes)
    scatter = scatter_bytes(half, region * half)
    most = selected_count(setup.context, setup.alpha, setup.kept_tokens, None)
    sizes = (most, 1, half, setup.piece_bytes)
    return (
        tails
        + 64 * half
        + 2 * 64 * half
        + scatter
        + piece_units(*sizes) * sum(piece_counts(0, 0, *sizes)) * half
        + (4 * shape.query_heads * setup.context)
    )


def expected_sets(run):
    """Positions by layer and sequence, from weights in float64."""
    sets = {}
    for layer, row in run.units():
        shape, length = run.setup.shape, run.length
        keys = run.keys[layer, row, :, :length].double()
        query = run.queries[layer, row, :, length - 1].double().view(shape.kv_heads, -1, 1)
        query = query.view(shape.kv_heads, -1, shape.head_dim)
        scores = (query @ keys.transpose(1, 2) * SCALING).softmax(-1).sum((0, 1)).numpy()
        scores[: run.setup.kept_sinks] = scores[length - run.setup.kept_recent :] = np.inf
        chosen = selected_count(length, run.setup.alpha, run.setup.kept_tokens, None)
        sets[layer, row] = np.sort(np.argsort(-scores, kind="stable")[:chosen])
    return sets


def visible(run, positions):
    seen = torch.zeros(1, run.length, dtype=torch.bool)
    seen[0, torch.from_numpy(positions)] = True
    return seen


@pytest.mark.parametrize("piece_bytes", [1, 8 << 20])
@pytest.mark.parametrize("shape", [SHAPE, replace(MULTI_HEAD, stored_type=StoredType.BFLOAT16)])
@pytest.mark.parametrize("extra", [0, 100_000, 32 << 20])
def test_everything_selected_is_full_attention(cold_dir, shape, extra, piece_bytes):
    setup = make_setup(cold_dir, shape, alpha=1.0, block_rows=50, piece_bytes=piece_bytes)
    run = Run(NAME, replace(setup, budget_bytes=fixed_bytes(setup) + extra), 734)
    with run.rival:
        for _ in range(5):
            assert run.error(run.step()) < 1e-4


@pytest.mark.parametrize("extra", [0, 150_000])
def test_attends_to_the_heaviest_tokens(cold_dir, extra):
    setup = make_setup(cold_dir, batch=1)
    run = Run(NAME, replace(setup, budget_bytes=fixed_bytes(setup) + extra), 734)
    with run.rival:
        for _ in range(5):
            found = run.step()
            for unit, positions in expected_sets(run).items():
                exact = run.exact(*unit, visible(run, positions))
                assert (found[unit].double() - exact).abs().max() < 1e-4
                assert (found[unit].double() - run.exact(*unit)).abs().max() > 1e-3


@pytest.mark.parametrize("plane", ["keys", "values"])
def test_a_bit_flipped_on_the_drive_is_seen(cold_dir, plane):
    setup = make_setup(cold_dir, alpha=1.0)
    run = Run(NAME, replace(setup, budget_bytes=fixed_bytes(setup)), 734)
    with run.rival as rival:
        flip_on_drive(getattr(rival, plane), 1, 1, 300, 1)
        found = run.step()
        assert run.wrong(found, 1, 1)
        assert not run.wrong(found, 1, 0)


@pytest.mark.parametrize(
    ("shape", "batch", "prompt", "extra", "alpha"),
    [
        (SHAPE, 2, 700, 0, 0.2),
        (SHAPE, 1, 900, 60_000, 0.1),
        (WIDE, 1, 500, 2_000_000, 0.3),
        (MULTI_HEAD, 2, 400, 1_000_000, 0.2),
        (PAPER, 1, 400, 1_000_000, 0.2),
        # Halves of 16 KiB.
        (replace(PAPER, kv_heads=64, query_heads=64), 1, 300, 1_000_000, 0.2),
    ],
)
def test_bytes_are_the_formula(cold_dir, shape, batch, prompt, extra, alpha):
    setup = make_setup(cold_dir, shape, batch=batch, alpha=alpha)
    run = Run(NAME, replace(setup, budget_bytes=fixed_bytes(setup) + extra), prompt)
    half, recent = half_bytes(shape), setup.kept_recent
    region = -(-setup.context // 64) * 64
    with run.rival as rival:
        pools = {unit: ReferencePool(rival.pool.slots) for unit in run.units()}
        for pool in pools.values():
            pool.fill(range(spilled(prompt, recent)))
        tables = 4 * region + 12 * rival.pool.slots if rival.pool.slots else 0
        values = setup.units * (tables + rival.pool.slots * half)
        keys = setup.units * rival.held_tokens * half
        assert rival.traffic().dram_bytes == fixed_bytes(setup) + keys + values
        assert rival.traffic().dram_peak_bytes <= fixed_bytes(setup) + extra
        expected, unit = 0, rival.values.files[0].read_unit
        for _ in range(30):
            before = spilled(run.length, recent)
            run.step()
            for pool in pools.values():
                pool.fill(range(before, spilled(run.length, recent)))
            cold = max(0, spilled(run.length, recent) - rival.held_tokens)
            expected += setup.units * cold * half
            for (layer, row), positions in expected_sets(run).items():
                outside = positions[positions < spilled(run.length, recent)]
                missing = pools[layer, row].misses(outside.tolist())
                expected += wire_bytes(missing, half, row * region * half, unit)
            ahead = 64 * half if cold else 0
            assert rival.traffic().drive_read_bytes == expected + ahead
        groups = spilled(run.length, recent)
        both = groups + max(0, groups - rival.held_tokens)
        assert rival.traffic().drive_write_bytes == setup.units * both * half


def test_a_budget_too_small_is_refused(cold_dir):
    setup = make_setup(cold_dir)
    with pytest.raises(BudgetError, match="too small for this rival"):
        make_rival(NAME, replace(setup, budget_bytes=fixed_bytes(setup) - 1))
