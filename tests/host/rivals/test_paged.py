# SPDX-License-Identifier: Apache-2.0
"""Quest's pages and LeoAM's chunks: right, within the budget, and counted to the byte."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference_pool import ReferencePool, pages, scatter_bytes, spilled, wire_bytes
from rival_cases import (
    LEFT_TO_TORCH,
    MULTI_HEAD,
    SCALING,
    SHAPE,
    WIDE,
    Run,
    flip_on_drive,
    make_setup,
)

from hillinfer.errors import BudgetError
from hillinfer.model_shape import StoredType
from hillinfer_bench.rivals.drive_rows import piece_counts, piece_units
from hillinfer_bench.rivals.table import make_rival
from hillinfer_model.selection import selected_count

LEVELS = {"quest": (16,), "leoam": (64, 16)}


@pytest.fixture(params=LEVELS)
def name(request):
    return request.param


def fixed_bytes(name, setup):
    """The formula of the pages for what is held besides the pool."""
    shape, row = setup.shape, setup.shape.row_bytes
    region = -(-setup.context // 64) * 64
    bounds = sum(
        setup.units * region // size * 2 * 2 * shape.kv_heads * shape.head_dim
        for size in LEVELS[name]
    )
    tails = setup.units * pages((64 + setup.kept_recent) * row)
    most = -(-selected_count(setup.context, setup.alpha, setup.kept_tokens, None) // 16)
    most = min(most, region // 16)
    fetches = 2 * setup.batch if name == "leoam" else 0
    pieces = sum(piece_counts(setup.ahead_rows, fetches, most, 16, row, setup.piece_bytes))
    units = pieces * piece_units(most, 16, row, setup.piece_bytes)
    return bounds + tails + units * 16 * row + scatter_bytes(16 * row, region * row)


def upper_bounds(run, layer, row, size, chosen):
    """The softmax of pages' bounds, summed over heads, channel by channel in float64."""
    shape = run.setup.shape
    last = spilled(run.length, run.setup.kept_recent)
    keys = run.keys[layer, row, :, :last].double().unflatten(1, (-1, size))[:, chosen]
    query = run.queries[layer, row, :, run.length - 1].double()
    query = query.view(shape.kv_heads, -1, 1, shape.head_dim)
    high, low = (part[:, None] for part in (keys.amax(2), keys.amin(2)))
    bound = torch.maximum(query * high, query * low).sum(-1) * SCALING
    scores = bound.softmax(-1).sum((0, 1)).numpy()
    scores[0] = np.inf
    return scores


def expected_pages(name, run, layer, row):
    length, last = run.length, spilled(run.length, run.setup.kept_recent)
    chosen = selected_count(length, run.setup.alpha, run.setup.kept_tokens, None)
    wanted = max(1, -(-(chosen - (length - last)) // 16))
    if wanted >= last // 16:
        return np.arange(last // 16)
    candidates = np.arange(last // 16)
    split = -(-2 * wanted // 4)
    if name == "leoam" and split < last // 64:
        scores = upper_bounds(run, layer, row, 64, np.arange(last // 64))
        chunks = np.sort(np.argsort(-scores)[:split])
        candidates = (chunks[:, None] * 4 + np.arange(4)).reshape(-1)
    scores = upper_bounds(run, layer, row, 16, candidates)
    return np.sort(candidates[np.argsort(-scores)[:wanted]])


def visible(run, chosen):
    seen = torch.zeros(1, run.length, dtype=torch.bool)
    for page in chosen:
        seen[0, page * 16 : page * 16 + 16] = True
    seen[0, spilled(run.length, run.setup.kept_recent) :] = True
    return seen


@pytest.mark.parametrize("piece_bytes", [1, 8 << 20])
@pytest.mark.parametrize("shape", [SHAPE, replace(MULTI_HEAD, stored_type=StoredType.BFLOAT16)])
def test_everything_selected_is_full_attention(cold_dir, name, shape, piece_bytes):
    setup = make_setup(cold_dir, shape, alpha=1.0, block_rows=50, piece_bytes=piece_bytes)
    run = Run(name, replace(setup, budget_bytes=fixed_bytes(name, setup) + 100_000), 734)
    with run.rival:
        for _ in range(5):
            assert run.error(run.step()) < 1e-4


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.45])
def test_attends_to_the_best_pages_and_the_tail(cold_dir, name, alpha):
    run = Run(name, make_setup(cold_dir, alpha=alpha, context=1500), 1400)
    with run.rival:
        for _ in range(5):
            found = run.step()
            for unit in run.units():
                seen = visible(run, expected_pages(name, run, *unit))
                assert seen[0, :4].all()
                assert seen[0, -32:].all()
                exact = run.exact(*unit, seen)
                assert (found[unit].double() - exact).abs().max() < 1e-4
                assert (found[unit].double() - run.exact(*unit)).abs().max() > 1e-3


def test_torch_attends_where_the_native_library_does_not(cold_dir, name):
    setup = make_setup(cold_dir, LEFT_TO_TORCH, context=1500, block_rows=50)
    run = Run(name, setup, 1400)
    with run.rival:
        for _ in range(3):
            found = run.step()
            for unit in run.units():
                exact = run.exact(*unit, visible(run, expected_pages(name, run, *unit)))
                assert (found[unit].double() - exact).abs().max() < 1e-4


def test_leoam_ranks_by_the_query_that_was_predicted(cold_dir):
    run = Run("leoam", make_setup(cold_dir, alpha=0.2, context=1500), 1400)
    with run.rival as rival:
        at = slice(run.length, run.length + 1)
        true = run.queries[:, :, :, at].clone()
        predicted = -true
        run.queries[:, :, :, at] = predicted
        run.length += 1
        sets = {unit: expected_pages("leoam", run, *unit) for unit in run.units()}
        run.queries[:, :, :, at] = true
        others = {unit: expected_pages("leoam", run, *unit) for unit in run.units()}
        rival.begin_step()
        for layer in range(2):
            rival.predict(layer, predicted[layer], SCALING)
            for row in range(2):
                keys, values = (part[layer, row, :, at] for part in (run.keys, run.values))
                rival.append(layer, row, keys, values)
            for row in range(2):
                found = rival.attend(layer, row, true[layer, row], SCALING).double()
                off = [
                    (found - run.exact(layer, row, visible(run, own[layer, row]))).abs().max()
                    for own in (sets, others)
                ]
                assert off[0] < 1e-4 < off[1]


@pytest.mark.parametrize("predicted", [True, False])
def test_leoam_reads_alike_with_and_without_predictions(cold_dir, predicted):
    setup = make_setup(cold_dir, alpha=0.2, context=1500)
    run = Run("leoam", setup, 1300)
    with run.rival as rival:
        for layer in (0, 1, 0):
            # Forgotten, since no step follows.
            rival.predict(layer, run.queries[layer, :, :, 1300:1301], SCALING)
        for _ in range(70):
            found = run.step(predicted)
            for unit in run.units():
                exact = run.exact(*unit, visible(run, expected_pages("leoam", run, *unit)))
                assert (found[unit].double() - exact).abs().max() < 1e-4


def test_leoam_and_quest_do_not_select_alike(cold_dir):
    run = Run("quest", make_setup(cold_dir, alpha=0.2, context=1500), 1400)
    with run.rival:
        run.step()
        sets = [[expected_pages(name, run, *unit) for unit in run.units()] for name in LEVELS]
        assert any(not np.array_equal(*pair) for pair in zip(*sets, strict=True))


def test_a_bit_flipped_on_the_drive_is_seen(cold_dir, name):
    setup = make_setup(cold_dir, alpha=1.0)
    run = Run(name, replace(setup, budget_bytes=fixed_bytes(name, setup)), 734)
    with run.rival as rival:
        flip_on_drive(rival.rows, 1, 1, 300, SHAPE.row_bytes // 2 + 1)
        found = run.step()
        assert run.wrong(found, 1, 1)
        assert not run.wrong(found, 1, 0)


@pytest.mark.parametrize(
    ("shape", "batch", "prompt", "extra", "alpha"),
    [
        (SHAPE, 2, 720, 0, 0.2),
        (SHAPE, 1, 900, 60_000, 0.15),
        (WIDE, 1, 500, 8_000_000, 0.3),
        (MULTI_HEAD, 2, 600, 1_000_000, 0.3),
    ],
)
def test_bytes_are_the_formula(cold_dir, name, shape, batch, prompt, extra, alpha):
    setup = make_setup(cold_dir, shape, batch=batch, alpha=alpha)
    budget = fixed_bytes(name, setup) + extra
    run = Run(name, replace(setup, budget_bytes=budget), prompt)
    region, unit_bytes = -(-setup.context // 64) * 64, 16 * shape.row_bytes
    with run.rival as rival:
        slots = rival.pool.slots
        assert (slots > 0) == (extra > 0)
        pool = setup.units * (4 * region // 16 * (slots > 0) + slots * (unit_bytes + 12))
        assert rival.traffic().dram_bytes == fixed_bytes(name, setup) + pool
        assert rival.traffic().dram_peak_bytes <= budget
        pools = {unit: ReferencePool(slots) for unit in run.units()}
        for pool_of_unit in pools.values():
            pool_of_unit.fill(range(spilled(prompt, 32) // 16))
        expected, read_unit = 0, rival.rows.files[0].read_unit
        for _ in range(30):
            before = spilled(run.length, 32)
            run.step()
            for layer, row in run.units():
                pools[layer, row].fill(range(before // 16, spilled(run.length, 32) // 16))
                chosen = expected_pages(name, run, layer, row).tolist()
                missing = pools[layer, row].misses(chosen)
                start = row * region * shape.row_bytes
                expected += wire_bytes(missing, unit_bytes, start, read_unit)
            assert rival.traffic().drive_read_bytes == expected
        written = setup.units * spilled(run.length, 32) * shape.row_bytes
        assert rival.traffic().drive_write_bytes == written


def test_with_room_for_everything_nothing_of_the_prompt_is_read(cold_dir, name):
    run = Run(name, make_setup(cold_dir, alpha=0.5), 734)
    with run.rival as rival:
        for _ in range(70):
            run.step()
        assert rival.traffic().drive_read_bytes == 0
        # The twin: what is not in the pool is read.
        rival.pool.place[...] = -1
        rival.pool.owner[...] = -1
        run.step()
        assert rival.traffic().drive_read_bytes > 0


def test_a_budget_too_small_is_refused(cold_dir, name):
    setup = make_setup(cold_dir)
    with pytest.raises(BudgetError, match="too small for this rival"):
        make_rival(name, replace(setup, budget_bytes=fixed_bytes(name, setup) - 1))
