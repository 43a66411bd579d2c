# SPDX-License-Identifier: Apache-2.0
"""One case measured: who is left out, which rates limits are made with, which shadow was used."""

from dataclasses import replace

import pytest
import torch

from hillinfer.drive.files import IOMode, probe_io_mode
from hillinfer_bench.decode.measuring import Bed, measure_case
from hillinfer_bench.decode.room import SLACK_BYTES, FreeRoom
from hillinfer_bench.decode.run import attached
from hillinfer_bench.report.rows import MachineRates
from hillinfer_bench.systems.case import BenchSetting, Case
from hillinfer_bench.systems.kv_source import RandomKV
from hillinfer_bench.systems.shapes import SHAPES
from hillinfer_bench.systems.table import FLOOR, make_system

CONTEXT, WEIGHTS = 1024, 10**6
SYSTEMS = ("hillinfer", "full-drive", "full-memory", "transformers-dynamic")


@pytest.fixture(scope="module")
def bed(cold_dir):
    if probe_io_mode(cold_dir) is not IOMode.DIRECT:
        pytest.skip(f"{cold_dir} has no direct I/O: set TMPDIR to a directory on a drive")
    case = Case("tiny", CONTEXT, SYSTEMS, shadow="int8", steps=3, warm_up=1, turn=2)
    shape = SHAPES["tiny"].kv_shape(CONTEXT + 4, torch.float32)
    model = SHAPES["tiny"].build(CONTEXT + 4, torch.float32)
    setting = BenchSetting(case, model, shape, 8 << 20, cold_dir, None)
    return Bed(setting, shape.layers, WEIGHTS, RandomKV(shape, CONTEXT, 1), None)


class Rates:
    """Rates as if measured: at the start, and the same or others between turns."""

    def __init__(self, start, *beside):
        self.start = start
        self.beside = list(beside)
        self.samples = 0

    def sample(self):
        self.samples += 1
        return self.beside.pop() if self.beside else self.start


def measured(bed, rates, free=None):
    rates = rates if isinstance(rates, Rates) else Rates(rates)
    with attached(bed.setting.model):
        return {row.system: row for row in measure_case(bed, rates, free=free)}


def test_limits_are_made_with_the_best_rate_that_the_case_has_shown(bed):
    # No machine is so slow.
    rows = measured(bed, MachineRates(memory=1.0, drive=1e12))
    assert all(row.skipped is None for row in rows.values())
    shown = WEIGHTS / rows[FLOOR].min_ms * 1e3
    for row in rows.values():
        assert row.memory_gbps == pytest.approx(shown / 1e9)
    assert rows[FLOOR].limit_ms <= rows[FLOOR].min_ms * 1.05
    fast = measured(bed, MachineRates(memory=1e15, drive=1e12))
    assert {row.memory_gbps for row in fast.values()} == {1e6}


def test_rates_are_measured_between_the_turns_and_the_best_makes_the_limits(bed):
    rates = Rates(MachineRates(1e15, 1e9), MachineRates(1e9, 3e9), MachineRates(1e9, 2e9))
    rows = measured(bed, rates)
    # A warm-up and two turns of each, with a measurement before and after.
    assert rates.samples == 3 * len(rows) + 1
    assert {(row.memory_gbps, row.drive_gbps) for row in rows.values()} == {(1e6, 3.0)}


def test_the_middle_of_what_was_measured_between_the_turns_makes_another_limit(bed):
    """All measurements but one find a drive that is slower than a step shows it to be."""
    case = replace(bed.setting.case, systems=("full-drive",))
    setting = replace(bed.setting, case=case, budget_bytes=1 << 16)
    slow, fast = MachineRates(1e15, 1.0), MachineRates(1e15, 1e12)
    full = measured(replace(bed, setting=setting), Rates(slow, fast))["full-drive"]
    assert full.drive_gbps == 1e3
    assert full.limit_ms == pytest.approx(full.drive_read_bytes / 1e9)
    assert full.middle_limit_ms == pytest.approx(full.median_ms)
    # The twin: where all are as fast both limits are the same.
    full = measured(replace(bed, setting=setting), Rates(fast))["full-drive"]
    assert full.middle_limit_ms == full.limit_ms


def test_a_row_that_beats_every_rate_is_flagged_and_the_others_go_on(bed):
    case = replace(bed.setting.case, systems=("full-drive", "full-memory"))
    setting = replace(bed.setting, case=case, budget_bytes=1 << 16)
    # No drive takes so long for a read.
    slow = MachineRates(memory=1e15, drive=1e12, scattered=((4096, 1.0),))
    rows = measured(replace(bed, setting=setting), slow)
    assert all(row.skipped is None for row in rows.values())
    assert {name for name, row in rows.items() if row.beats_limit} == {"full-drive"}
    assert "below the limit" in rows["full-drive"].flags[-1]


def test_bytes_read_from_memory_are_those_of_the_form_that_won(bed):
    row = measured(bed, MachineRates(memory=1e10, drive=1e9))["full-memory"]
    item_bytes = 4 if "float32" in row.chosen else 2
    shape = bed.setting.shape
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * item_bytes
    # One step of warm-up, then three.
    assert row.dram_read_bytes == (CONTEXT + 3) * token


def test_rows_say_which_shadow_was_used(bed):
    rows = measured(bed, MachineRates(memory=1e10, drive=1e9))
    assert rows["hillinfer"].shadow_used == "int8"
    assert rows["full-drive"].shadow_used is None
    case = replace(bed.setting.case, shadow="auto", systems=("hillinfer",))
    chosen = measured(
        replace(bed, setting=replace(bed.setting, case=case)), MachineRates(1e10, 1e9)
    )
    row = chosen["hillinfer"]
    assert row.shadow == "auto"
    assert f"shadow {row.shadow_used}" in row.chosen


def test_a_system_without_room_leaves_the_others_theirs(bed):
    kept = sum(make_system(name).needs(bed.setting).memory for name in SYSTEMS[:-1])
    free = FreeRoom(kept + SLACK_BYTES, 1 << 40)
    rows = measured(bed, MachineRates(memory=1e10, drive=1e9), free)
    skipped = {name: row.skipped for name, row in rows.items() if row.skipped}
    assert list(skipped) == ["transformers-dynamic"]
    assert "the largest first" in skipped["transformers-dynamic"]
    assert rows["full-memory"].median_ms > 0
    assert rows[FLOOR].median_ms > 0


def test_where_nothing_fits_every_row_says_why(bed):
    rows = measured(bed, MachineRates(memory=1e10, drive=1e9), FreeRoom(0, 1 << 40))
    assert set(rows) == {FLOOR, *SYSTEMS}
    assert all("are free" in row.skipped for row in rows.values())
