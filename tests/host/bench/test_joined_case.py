# SPDX-License-Identifier: Apache-2.0
"""Caches that decode together and one after another: what is measured, and what is said of it."""

from dataclasses import replace

import pytest
import torch
from bench_cases import measured_row

from hillinfer.drive.files import IOMode, probe_io_mode
from hillinfer.errors import BudgetError
from hillinfer_bench.decode.joined import joined_tokens, measure_joined
from hillinfer_bench.decode.measuring import Bed
from hillinfer_bench.decode.plan import make_plan
from hillinfer_bench.decode.request import Chosen
from hillinfer_bench.decode.room import FreeRoom
from hillinfer_bench.report.bench_report import bench_report, table_text
from hillinfer_bench.report.goals import joined_goal_names, joined_goal_records, joined_ratios
from hillinfer_bench.report.report_check import report_faults
from hillinfer_bench.report.rows import MachineRates
from hillinfer_bench.systems.case import Case, case_setting
from hillinfer_bench.systems.kv_source import RandomKV
from hillinfer_bench.systems.shapes import SHAPES
from hillinfer_bench.systems.table import ALONE, FLOOR, JOINED

CACHES, CONTEXT, WEIGHTS = 3, 600, 10**6


class Rates:
    """Rates of a machine that is always the same."""

    start = MachineRates(1e15, 1e15)

    def sample(self):
        return self.start


@pytest.fixture(scope="module")
def bed(cold_dir):
    if probe_io_mode(cold_dir) is not IOMode.DIRECT:
        pytest.skip(f"{cold_dir} has no direct I/O: set TMPDIR to a directory on a drive")
    case = Case(
        "tiny", CONTEXT, (JOINED,), batch=CACHES, budget_share=40.0, steps=3, warm_up=1, turn=2,
        part="joined",
    )  # fmt: skip
    model = SHAPES["tiny"].build(joined_tokens(case), torch.float32)
    setting = case_setting(case, model, None, joined_tokens(case), cold_dir)
    source = RandomKV(setting.shape, CONTEXT, CACHES)
    return Bed(setting, setting.all_layers, WEIGHTS, source, None)


def test_both_ways_bring_each_cache_a_token_a_step(bed):
    done = []
    rows = {row.system: row for row in measure_joined(bed, Rates(), done.append)}
    assert done == sorted(done)
    assert done[-1] == 3 * bed.setting.case.all_steps
    together, alone, floor = rows[JOINED], rows[ALONE], rows[FLOOR]
    assert (floor.steps, floor.batch, floor.dram_read_bytes) == (3, CACHES, 0)
    assert floor.limit_ms == pytest.approx(1e-12 * WEIGHTS)
    for row in (together, alone):
        assert (row.steps, len(row.step_ms)) == (3, 3)
        assert row.tokens_per_second == pytest.approx(CACHES * 1e3 / row.median_ms)
        assert row.held_bytes <= row.budget_bytes == bed.setting.budget_bytes
        assert row.hit_rate == 1.0
        assert row.drive_read_bytes == 0
        assert row.shadow_used in row.chosen
    # The same tokens are scored and read, a step apart; weights are read once, or for each cache.
    assert together.dram_read_bytes == pytest.approx(alone.dram_read_bytes, rel=0.02)
    weights = [1e-12 * (n * WEIGHTS + row.dram_read_bytes) for n, row in
               ((1, together), (CACHES, alone))]  # fmt: skip
    assert [together.limit_ms, alone.limit_ms] == pytest.approx(weights)


def test_too_little_room_is_said_before_a_cache_is_made(bed):
    rows = measure_joined(bed, Rates(), free=FreeRoom(0, 1 << 40))
    assert [row.system for row in rows] == [JOINED, ALONE, FLOOR]
    assert all("of memory" in row.skipped for row in rows)


def test_a_budget_that_holds_no_more_caches_is_refused(bed):
    case = replace(bed.setting.case, budget_share=1.0)
    setting = replace(bed.setting, case=case, budget_bytes=1 << 20)
    with pytest.raises(BudgetError, match="too small"):
        measure_joined(replace(bed, setting=setting), Rates())


def joined_rows(together=100.0, alone=310.0, **changes):
    given = {
        "model": "smollm2", "context": 4096, "batch": 8, "budget_share": 2.0, "part": "joined",
        "selection": "measured selection", "shadow_used": "int4",
    }  # fmt: skip
    given |= changes
    return [
        measured_row(JOINED, together, **given),
        measured_row(ALONE, alone, **given),
    ]


def told(rows, folder):
    return bench_report(rows, {"plan": "goals"}, Rates.start, [], folder / "bench.json")


@pytest.mark.parametrize(("alone", "met"), [(310.0, True), (290.0, False)])
@pytest.mark.parametrize("number", [0, 1])
def test_the_goal_is_three_times_in_each_budget(alone, met, number):
    records = joined_goal_records(joined_rows(alone=alone, budget_share=(2.0, 0.25)[number]))
    assert [one.goal for one in records] == joined_goal_names()
    assert (records[number].met, records[number].reached) == (met, alone / 100)
    assert records[1 - number].met is None
    assert "no case has" in records[1 - number].row


@pytest.mark.parametrize(
    "changes", [{"spread": 0.5}, {"context": 2048}, {"batch": 4}, {"model": "tiny"}]
)
def test_flagged_rows_and_those_of_other_cases_meet_no_goal(changes):
    record = joined_goal_records(joined_rows(**changes))[0]
    assert record.met is (False if "spread" in changes else None)
    assert record.reached == pytest.approx(3.1)


def test_the_report_has_both_rows_and_what_bytes_and_rates_allow(tmp_path):
    rows = joined_rows()
    report = told(rows, tmp_path)
    assert report_faults(report) == []
    (ratio,) = joined_ratios(rows)
    assert ratio.allowed == pytest.approx(rows[1].limit_ms / rows[0].limit_ms)
    table = table_text(rows, report)
    assert "| joined_speedup " in table
    assert f"| {ratio.allowed:.2f} " in table
    # Quality stands beside single caches' times; who is joined answers as alone.
    assert not any("no quality beside" in goal["row"] for goal in report["goals"])
    report["rows"][0]["held_bytes"] = report["rows"][0]["budget_bytes"] + 1
    assert "exceed budget_bytes" in report_faults(report)[0]


@pytest.mark.parametrize(("floor", "of_it"), [(1e-3, None), (100.0, 3.1)])
def test_no_more_is_allowed_than_the_loop_alone_leaves(floor, of_it):
    rows = joined_rows()
    modelled = joined_ratios(rows)[0].allowed
    (ratio,) = joined_ratios([*rows, replace(rows[0], system=FLOOR, median_ms=floor)])
    assert ratio.allowed == pytest.approx(of_it or modelled)


@pytest.mark.parametrize(
    ("chosen", "cases", "joined"),
    [
        (Chosen(systems=(JOINED,)), 0, 2),
        (Chosen(systems=("hillinfer",)), 1, 0),
        (Chosen(contexts=(4096,), budgets=(0.25,)), 0, 1),
        (Chosen(batches=(8,), steps=3), 0, 2),
    ],
)
def test_joined_cases_are_chosen_as_others(chosen, cases, joined):
    left = make_plan("goals", "smollm2").only(replace(chosen, models=("smollm2",)))
    assert (len(left.cases), len(left.joined)) == (cases, joined)
    assert all(case.steps == (chosen.steps or 24) for case in left.joined)
