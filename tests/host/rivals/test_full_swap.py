# SPDX-License-Identifier: Apache-2.0
"""The whole cache in mapped memory: right, really paged out, and counted to the page."""

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from rival_cases import MULTI_HEAD, SHAPE, Run, make_setup

from hillinfer.errors import BudgetError, ColdPoolError
from hillinfer.model_shape import StoredType
from hillinfer_bench.rivals.full_swap import pages_in_memory
from hillinfer_bench.rivals.table import make_rival

NAME, PAGE = "full-swap", 4096


@pytest.fixture(autouse=True)
def _pages_can_be_given_back(cold_dir):
    try:
        make_rival(NAME, make_setup(cold_dir)).close()
    except ColdPoolError as error:
        pytest.skip(f"full-swap: {error} (pytest: set --basetemp to a drive)")


def make_run(cold_dir, windows, shape=SHAPE, prompt=734, **changes):
    budget = windows * 64 * shape.row_bytes
    return Run(NAME, make_setup(cold_dir, shape, budget_bytes=budget, **changes), prompt)


@pytest.mark.parametrize("windows", [4, 20, 1000])
@pytest.mark.parametrize("shape", [SHAPE, replace(MULTI_HEAD, stored_type=StoredType.BFLOAT16)])
def test_attends_to_everything(cold_dir, windows, shape):
    run = make_run(cold_dir, windows, shape, block_rows=50)
    with run.rival:
        for _ in range(5):
            assert run.error(run.step()) < 1e-4


def test_a_bit_flipped_on_the_drive_is_seen(cold_dir):
    run = make_run(cold_dir, 4)
    with run.rival as rival:
        row = rival.rows[1, 0, 300].ctypes.data - rival.rows.ctypes.data
        at = row + SHAPE.row_bytes // 2 + 1
        assert not pages_in_memory(rival.rows.reshape(-1))[at // PAGE]
        path = Path(f"/proc/self/fd/{rival.file.descriptor}")
        with path.open("r+b", buffering=0) as file:
            file.seek(at)
            (old,) = file.read(1)
            file.seek(at)
            file.write(bytes([old ^ 0x40]))
        found = run.step()
        assert run.wrong(found, 1, 0)
        assert not run.wrong(found, 1, 1)


def test_memory_really_holds_no_more_than_the_windows(cold_dir):
    run = make_run(cold_dir, 6)
    with run.rival as rival:
        for _ in range(3):
            run.step()
        present = pages_in_memory(rival.rows.reshape(-1))
        # What is paged out is gone, and what is in use is there.
        assert 0 < present.sum() * PAGE <= 6 * rival.window_bytes
        assert len(present) * PAGE > 30 * rival.window_bytes


def reference(run, steps):
    """Pages read and written, by an LRU of windows in plain Python."""
    row, batch = run.setup.shape.row_bytes, run.setup.batch
    window_pages, most = 64 * row // PAGE, run.rival.windows
    memory, drive, counts = OrderedDict(), {}, {"read": 0, "written": 0}
    region = -(-run.setup.context // 64)

    def clean(key):
        drive.setdefault(key, set()).update(memory[key])
        counts["written"] += len(memory[key])
        memory[key] = set()

    def touch(unit, window):
        key = unit * region + window
        if key in memory:
            memory.move_to_end(key)
            return key
        if len(memory) == most:
            order = list(memory)
            unwritten = [one for one in order[:-1] if not memory[one]]
            victim = unwritten[0] if unwritten else order[0]
            clean(victim)
            del memory[victim]
        counts["read"] += len(drive.get(key, ()))
        memory[key] = set()
        return key

    def write(unit, begin, end):
        for token in range(begin, end):
            key = touch(unit, token // 64)
            at = token % 64 * row
            memory[key].update(range(at // PAGE, -(-(at + row) // PAGE)))
            assert max(memory[key]) < window_pages
            if token % 64 == 63:
                clean(key)

    prompt = run.prompt
    for unit in range(run.setup.units):
        write(unit, 0, prompt // 3)
        write(unit, prompt // 3, prompt)
    for length in range(prompt + 1, prompt + steps + 1):
        for layer in range(run.setup.shape.layers):
            for unit in range(layer * batch, layer * batch + batch):
                write(unit, length - 1, length)
            for unit in range(layer * batch, layer * batch + batch):
                last = (length - 1) // 64
                for window in range(last + 1):
                    touch(unit, window)
                    touch(unit, min(window + 1, last))
    return {name: count * PAGE for name, count in counts.items()}


@pytest.mark.parametrize(
    ("shape", "batch", "prompt", "windows"),
    [(SHAPE, 2, 700, 4), (SHAPE, 1, 900, 20), (MULTI_HEAD, 2, 400, 9), (SHAPE, 2, 300, 1000)],
)
def test_bytes_are_the_formula(cold_dir, shape, batch, prompt, windows):
    run = make_run(cold_dir, windows, shape, prompt, batch=batch)
    with run.rival as rival:
        for _ in range(10):
            run.step()
        expected = reference(run, 10)
        traffic = rival.traffic()
        assert traffic.drive_read_bytes == expected["read"]
        assert traffic.drive_write_bytes == expected["written"]
        assert traffic.dram_peak_bytes <= run.setup.budget_bytes
        if windows == 1000:
            full = run.setup.units * (run.length // 64) * 64 * shape.row_bytes
            assert (traffic.drive_read_bytes, traffic.drive_write_bytes) == (0, full)
        else:
            # Round and round, what comes next is what was given back longest ago: only windows
            # being filled may stay.
            full = run.setup.units * (prompt // 64) - windows
            everything = max(full, 0) * 64 * shape.row_bytes
            before = traffic.drive_read_bytes
            run.step()
            assert rival.traffic().drive_read_bytes - before >= everything


def test_a_budget_too_small_is_refused(cold_dir):
    setup = make_setup(cold_dir, budget_bytes=4 * 64 * SHAPE.row_bytes - 1)
    with pytest.raises(BudgetError, match=f"raise budget_bytes to {4 * 64 * SHAPE.row_bytes}"):
        make_rival(NAME, setup)


def test_memory_that_is_never_given_back_is_refused():
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("/dev/shm: no file system in memory here; mount a tmpfs there")
    with pytest.raises(ColdPoolError, match="stay in memory"):
        make_rival(NAME, make_setup(memory))
