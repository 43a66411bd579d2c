# SPDX-License-Identifier: Apache-2.0
"""The whole cache with a share in DRAM: right, within the budget, and counted to the byte."""

from dataclasses import replace

import pytest
from rival_cases import LEFT_TO_TORCH, MULTI_HEAD, SHAPE, Run, flip_on_drive, make_setup

from hillinfer.errors import BudgetError
from hillinfer.model_shape import StoredType
from hillinfer.settings import IOChoice
from hillinfer_bench.rivals.table import make_rival

GROUP = 64


def least_budget(setup, share_groups, block_groups=1):
    """The formula of docs/rivals/full-drive.md for what is held."""
    row, pages = setup.shape.row_bytes, 4096
    tail = -(-(GROUP + setup.kept_recent) * row // pages) * pages
    return setup.units * (tail + share_groups * GROUP * row) + 2 * block_groups * GROUP * row


def make_run(cold_dir, shape=SHAPE, share=2, prompt=734, **changes):
    setup = make_setup(cold_dir, shape, **changes)
    return Run("full-drive", replace(setup, budget_bytes=least_budget(setup, share)), prompt)


@pytest.mark.parametrize("io", [IOChoice.AUTO, IOChoice.THREADS])
@pytest.mark.parametrize("share", [0, 2, 100])
@pytest.mark.parametrize("shape", [SHAPE, replace(MULTI_HEAD, stored_type=StoredType.BFLOAT16)])
def test_attends_to_everything_while_groups_spill(cold_dir, io, share, shape):
    run = make_run(cold_dir, shape, share, io=io, block_rows=50)
    before = run.rival.spilled[0][0]
    with run.rival:
        for _ in range(5):
            assert run.error(run.step()) < 1e-4
        assert run.rival.spilled[0][0] == before + GROUP


def test_torch_attends_where_the_native_library_does_not(cold_dir):
    run = make_run(cold_dir, LEFT_TO_TORCH, block_rows=50)
    with run.rival:
        for _ in range(3):
            assert run.error(run.step()) < 1e-4


@pytest.mark.parametrize(("layer", "row", "position"), [(0, 0, 128), (1, 1, 639), (1, 0, 300)])
def test_a_bit_flipped_on_the_drive_is_seen(cold_dir, layer, row, position):
    run = make_run(cold_dir)
    with run.rival:
        flip_on_drive(run.rival.rows, layer, row, position, SHAPE.row_bytes // 2 + 1)
        found = run.step()
        assert run.wrong(found, layer, row)
        assert not run.wrong(found, 1 - layer, row)


def test_layers_in_any_order_and_left_out(cold_dir):
    run = make_run(cold_dir)
    with run.rival:
        run.step()
        for layer, row in [(1, 1), (0, 0), (0, 0), (1, 0), (0, 1)]:
            query = run.queries[layer, row, :, run.length - 1 : run.length]
            found = run.rival.attend(layer, row, query, 0.3)
            assert (found.double() - run.exact(layer, row)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("shape", "batch", "prompt", "share", "recent"),
    [
        (SHAPE, 2, 700, 2, 32),
        (SHAPE, 1, 900, 0, 32),
        (MULTI_HEAD, 3, 400, 1, 7),
        (SHAPE, 2, 130, 5, 32),
    ],
)
def test_bytes_are_the_formula(cold_dir, shape, batch, prompt, share, recent):
    run = make_run(cold_dir, shape, share, prompt, batch=batch, kept_recent=recent)
    units, row = run.setup.units, shape.row_bytes

    def spilled(length):
        # Groups leave the tail as the token after it comes that would not fit.
        return max(0, -(-(length - recent - GROUP) // GROUP)) * GROUP

    with run.rival as rival:
        read = expected = 0
        for step in range(70):
            run.step()
            cold = max(0, spilled(run.length) - share * GROUP)
            expected += units * cold * row
            read = rival.traffic().drive_read_bytes
            ahead = GROUP * row if cold else 0
            assert read == expected + ahead, step
        written = units * max(0, spilled(run.length) - share * GROUP) * row
        assert rival.traffic().drive_write_bytes == written
        assert rival.traffic().dram_bytes == run.setup.budget_bytes
        assert rival.traffic().dram_peak_bytes == run.setup.budget_bytes


def test_a_budget_too_small_is_refused(cold_dir):
    setup = make_setup(cold_dir)
    needed = least_budget(setup, 0)
    with pytest.raises(BudgetError, match="too small for this rival"):
        make_rival("full-drive", replace(setup, budget_bytes=needed - 1))
    make_rival("full-drive", replace(setup, budget_bytes=needed)).close()


def test_blocks_grow_with_the_budget(cold_dir):
    setup = make_setup(cold_dir, context=6400, budget_bytes=3 << 20, block_bytes=4 << 20)
    run = Run("full-drive", setup, 6000)
    with run.rival as rival:
        assert rival.stream.block_tokens == (3 << 20) // 16 // (GROUP * 128) * GROUP
        for _ in range(3):
            assert run.error(run.step()) < 1e-4
        assert rival.traffic().drive_read_bytes > 0
        assert rival.traffic().dram_peak_bytes <= 3 << 20
