# SPDX-License-Identifier: Apache-2.0
"""Speculation from partial keys: right, prefetched, within the budget, counted to the byte."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from reference_pool import ReferencePool, pages, scatter_bytes, spilled, wire_bytes
from rival_cases import MULTI_HEAD, PAPER, SCALING, SHAPE, WIDE, Run, flip_on_drive, make_setup

from hillinfer.errors import BudgetError
from hillinfer.model_shape import StoredType
from hillinfer_bench.rivals.block_attention import head_logits
from hillinfer_bench.rivals.drive_rows import piece_counts, piece_units
from hillinfer_bench.rivals.infinigen import InfiniGen, PartialKeys
from hillinfer_bench.rivals.rival import Meter
from hillinfer_bench.rivals.table import make_rival
from hillinfer_model.selection import selected_count

NAME = "infinigen"


def fixed_bytes(setup):
    """The formula of the page for what is held besides the pool."""
    shape, row = setup.shape, setup.shape.row_bytes
    region = -(-setup.context // 64) * 64
    channels = max(1, round(0.3 * shape.head_dim))
    heads = setup.units * shape.kv_heads
    partial = heads * (2 * setup.context * channels + 4 * shape.head_dim * channels)
    tails = setup.units * pages((64 + setup.kept_recent) * row)
    most = selected_count(setup.context, setup.alpha, setup.kept_tokens, None)
    scatter = scatter_bytes(row, region * row)
    pieces = sum(piece_counts(setup.ahead_rows, 2 * setup.batch, most, 1, row, setup.piece_bytes))
    landed = pieces * piece_units(most, 1, row, setup.piece_bytes)
    logits = 4 * shape.query_heads * setup.context
    return partial + tails + (landed + 64) * row + scatter + logits


class Noting(InfiniGen):
    """Notes the sets that it selects, by layer and sequence."""

    def __init__(self, setup):
        self.noted = {}
        super().__init__(setup)

    def batches(self, layer, row, ahead):
        yield from super().batches(layer, row, ahead)
        self.noted[layer, row] = ahead.positions


def visible(run, positions):
    seen = torch.zeros(1, run.length, dtype=torch.bool)
    seen[0, torch.from_numpy(positions)] = True
    return seen


@pytest.mark.parametrize("piece_bytes", [1, 8 << 20])
@pytest.mark.parametrize("shape", [SHAPE, replace(MULTI_HEAD, stored_type=StoredType.BFLOAT16)])
@pytest.mark.parametrize("predicted", [True, False])
def test_everything_selected_is_full_attention(cold_dir, shape, predicted, piece_bytes):
    setup = make_setup(cold_dir, shape, alpha=1.0, block_rows=50, piece_bytes=piece_bytes)
    run = Run(NAME, replace(setup, budget_bytes=fixed_bytes(setup) + 100_000), 734)
    with run.rival:
        for _ in range(5):
            assert run.error(run.step(predicted)) < 1e-4


@pytest.mark.parametrize("predicted", [True, False])
def test_attends_to_what_it_selects_and_nothing_else(cold_dir, predicted):
    run = Run(Noting, make_setup(cold_dir), 734)
    noted = run.rival.noted
    with run.rival:
        for _ in range(5):
            found = run.step(predicted)
            for unit, positions in noted.items():
                kept = [*range(4), *range(run.length - 32, run.length)]
                assert np.isin(kept, positions).all()
                assert len(positions) == selected_count(run.length, 0.2, 36, None)
                exact = run.exact(*unit, visible(run, positions))
                assert (found[unit].double() - exact).abs().max() < 1e-4
                assert (found[unit].double() - run.exact(*unit)).abs().max() > 1e-3


@pytest.mark.parametrize("rank", [4, 16])
def test_partial_keys_are_exact_where_keys_have_few_dimensions(cold_dir, rank):
    generator = torch.Generator().manual_seed(rank)
    heads, tokens, channels = SHAPE.kv_heads, 300, SHAPE.head_dim
    keys = torch.randn(heads, tokens, rank, generator=generator) @ torch.randn(
        heads, rank, channels, generator=generator
    )
    # What all keys have in common changes no weight.
    keys = (keys + 3 * torch.randn(heads, 1, channels, generator=generator)).half()
    query = torch.randn(SHAPE.query_heads, 1, channels, generator=generator)
    partial = PartialKeys(make_setup(cold_dir), torch.float16, Meter(None))
    partial.add(1, 0, 0, keys[:, :200])
    partial.add(1, 0, 200, keys[:, 200:])
    found, exact = torch.empty(2, SHAPE.query_heads, tokens)
    partial.logits(1, 0, query, SCALING, found)
    head_logits(query, keys, SCALING, exact)
    difference = (found.softmax(-1) - exact.softmax(-1)).abs().max()
    assert difference < 0.02 if rank < partial.channels else difference > 0.1


def test_a_bit_flipped_on_the_drive_is_seen(cold_dir):
    setup = make_setup(cold_dir, alpha=1.0)
    run = Run(NAME, replace(setup, budget_bytes=fixed_bytes(setup)), 734)
    with run.rival as rival:
        flip_on_drive(rival.rows, 1, 1, 300, SHAPE.row_bytes // 2 + 1)
        found = run.step()
        assert run.wrong(found, 1, 1)
        assert not run.wrong(found, 1, 0)


@pytest.mark.parametrize(
    ("shape", "batch", "prompt", "extra", "alpha"),
    [
        (SHAPE, 2, 720, 0, 0.2),
        (SHAPE, 1, 900, 60_000, 0.1),
        (WIDE, 1, 500, 2_000_000, 0.3),
        (MULTI_HEAD, 2, 400, 1_000_000, 0.2),
        (PAPER, 1, 400, 1_000_000, 0.2),
    ],
)
def test_bytes_are_the_formula(cold_dir, shape, batch, prompt, extra, alpha):
    setup = make_setup(cold_dir, shape, batch=batch, alpha=alpha)
    run = Run(Noting, replace(setup, budget_bytes=fixed_bytes(setup) + extra), prompt)
    noted = run.rival.noted
    region, bytes_of_row = -(-setup.context // 64) * 64, shape.row_bytes
    with run.rival as rival:
        slots = rival.pool.slots
        assert (slots > 0) == (extra > 0)
        pool = setup.units * (4 * region * (slots > 0) + slots * (bytes_of_row + 12))
        assert rival.traffic().dram_bytes == fixed_bytes(setup) + pool
        assert rival.traffic().dram_peak_bytes <= fixed_bytes(setup) + extra
        pools = {unit: ReferencePool(slots) for unit in run.units()}
        for pool in pools.values():
            pool.fill(range(spilled(prompt, 32)))
        expected, read_unit = 0, rival.rows.files[0].read_unit
        for _ in range(30):
            before = run.length
            run.step()
            for (layer, row), positions in noted.items():
                # What the tail gave up while the prefetch ran is read by itself.
                edges = [0, spilled(before, 32), spilled(run.length, 32)]
                for low, high in pairwise(edges):
                    part = positions[(positions >= low) & (positions < high)]
                    missing = pools[layer, row].misses(part.tolist())
                    start = row * region * bytes_of_row
                    expected += wire_bytes(missing, bytes_of_row, start, read_unit)
            assert rival.traffic().drive_read_bytes == expected
        written = setup.units * spilled(run.length, 32) * bytes_of_row
        assert rival.traffic().drive_write_bytes == written


@pytest.mark.parametrize("ahead_rows", [0, 64, 2048])
def test_odd_predictions_do_no_harm(cold_dir, ahead_rows):
    run = Run(NAME, make_setup(cold_dir, alpha=1.0, ahead_rows=ahead_rows, piece_bytes=1), 734)
    with run.rival as rival:
        for layer in (0, 1, 0):
            rival.predict(layer, run.queries[layer, :, :, 734:735], SCALING)
        for _ in range(3):
            assert run.error(run.step()) < 1e-4


def test_a_budget_too_small_is_refused(cold_dir):
    setup = make_setup(cold_dir)
    with pytest.raises(BudgetError, match="too small for this rival"):
        make_rival(NAME, replace(setup, budget_bytes=fixed_bytes(setup) - 1))
