# SPDX-License-Identifier: Apache-2.0
"""Speed-ups, goals and the form of the report, from rows made by hand."""

import json
from dataclasses import replace

import pytest
from bench_cases import measured_row

from hillinfer_bench.figures.bench_figures import bench_figures
from hillinfer_bench.report.bench_report import bench_report, table_text
from hillinfer_bench.report.goals import GOALS, goal_records, reached, speed_ups
from hillinfer_bench.report.other_reports import (
    drive_gbps,
    fio_gbps,
    reference_gbps,
    scorer_gbps,
)
from hillinfer_bench.report.report_check import SCALARS, report_faults
from hillinfer_bench.report.rows import MachineRates
from hillinfer_bench.rivals.h2o import HELD_PROMPT

RATES = MachineRates(memory=10e9, drive=1e9)
MEMORYS = "32768 tokens, α 0.1"
PAPERS = f"{MEMORYS}, budget 20%, batch 1, opt-6.7b, llama-13b"


def rows():
    """Return two cases with every system that a goal is about."""
    made = []
    for model, factor in (("opt-6.7b", 1.0), ("llama-13b", 2.0)):
        made += [
            measured_row("hillinfer", 10.0 * factor, model=model),
            measured_row("hillinfer-in-memory", 5.0, model=model),
            measured_row("full-drive", 100.0, model=model, limit_ms=40.0, kv_limit_ms=30.0),
            measured_row("h2o-all-keys", 60.0, model=model),
            measured_row("full-memory", 15.0, model=model),
            measured_row("infinigen", model=model, median_ms=50.0),
        ]
    return made


def report(made, folder):
    return bench_report(made, {"plan": "goals"}, RATES, [], folder / "bench.json")


def test_speed_ups_are_ratios_on_one_case_beside_what_is_allowed():
    ups = speed_ups(rows())
    drive = {up.row.split()[0]: up for up in ups if up.name == "speedup_vs_full_drive"}
    assert drive["opt-6.7b"].value == pytest.approx(10)
    assert drive["llama-13b"].value == pytest.approx(5)
    # 40 ms are allowed against 5 ms.
    assert drive["opt-6.7b"].allowed == pytest.approx(8)
    assert drive["opt-6.7b"].share_of_allowed == pytest.approx(10 / 8)
    assert drive["opt-6.7b"].kv_value == pytest.approx(10)


def test_rows_of_other_cases_are_not_compared():
    made = [measured_row("hillinfer"), replace(measured_row("full-drive"), context=4096)]
    assert speed_ups(made) == []


def test_a_goal_is_what_the_worst_case_reached():
    ups = speed_ups(rows())
    up = reached(GOALS[0], ups)
    assert up.value == pytest.approx(5)
    assert up.row.startswith("llama-13b")
    records = {record.goal: record for record in goal_records(ups)}
    assert records[f"speedup_vs_full_drive of 8.56 or more at {PAPERS}"].met is False
    assert records[f"speedup_vs_full_memory of 2 or more at {MEMORYS}"].met is True
    assert records[f"speedup_vs_leoam of 4.21 or more at {PAPERS}"].met is None


def test_the_share_of_what_is_allowed_is_that_of_its_own_worst_case():
    made = rows()
    # The larger speed-up, of which bytes and rates allow still more.
    made[2] = replace(made[2], limit_ms=400.0)
    records = {record.goal: record for record in goal_records(speed_ups(made))}
    share = records["speedup_vs_full_drive: 80% of what bytes and rates allow in every row"]
    assert share.reached == pytest.approx(10 / 80, abs=1e-3)
    assert share.row.startswith("opt-6.7b")
    least = records[f"speedup_vs_full_drive of 8.56 or more at {PAPERS}"]
    assert least.row.startswith("llama-13b")


NOISY, BEATEN = (
    {"spread": 0.3},
    {"limit_ms": 20.0, "serial_limit_ms": 25.0, "middle_limit_ms": 25.0},
)


@pytest.mark.parametrize("doubt", [NOISY, BEATEN])
@pytest.mark.parametrize("number", [1, 4])
def test_flagged_rows_meet_no_goal(number, doubt, tmp_path):
    made = rows()
    made[number] = replace(made[number], **doubt)
    records = {record.goal: record for record in goal_records(speed_ups(made))}
    name = f"speedup_vs_full_memory of 2 or more at {MEMORYS}"
    assert (records[name].met, records[name].flagged) == (False, True)
    assert records[f"speedup_vs_h2o of 8.56 or more at {PAPERS}"].flagged is False
    told = report(made, tmp_path)
    assert report_faults(told) == []
    assert "| yes " in table_text(made, told)
    goal = next(goal for goal in told["goals"] if goal["goal"] == name)
    goal["met"] = True
    assert "met by what is flagged" in report_faults(told)[0]
    goal.update(met=False)
    assert report_faults(told) == []


def test_a_goal_is_not_met_on_another_context():
    made = [replace(row, context=4096) for row in rows()]
    assert all(record.met is None for record in goal_records(speed_ups(made)))


def test_a_report_is_valid_and_its_scalars_name_rows_or_reasons(tmp_path):
    made = report(rows(), tmp_path)
    assert report_faults(made) == []
    assert made["speedup_vs_full_drive"] == pytest.approx(5)
    assert "llama-13b" in made["scalars"]["speedup_vs_full_drive"]["row"]
    assert made["speedup_vs_leoam"] is None
    assert "leoam" in made["scalars"]["speedup_vs_leoam"]["row"]
    assert made["machine_read_gbps"] == pytest.approx(10)
    assert made["fio_gbps"] is None
    assert "make drive" in made["scalars"]["fio_gbps"]["row"]
    json.dumps(made, allow_nan=False)


def test_every_step_of_a_row_is_in_the_report(tmp_path):
    steps = (9.0, *(10.0,) * 14, 30.0)
    made = report([measured_row(min_ms=9.0, step_ms=steps)], tmp_path)
    assert report_faults(made) == []
    written = json.loads(json.dumps(made))
    assert written["rows"][0]["step_ms"] == list(steps)
    assert report_faults(written) == []
    written["rows"][0]["step_ms"].pop()
    assert "step_ms has 15 steps, and steps is 16" in report_faults(written)[0]


@pytest.mark.parametrize("name", SCALARS)
def test_a_missing_scalar_is_found(name, tmp_path):
    made = report(rows(), tmp_path)
    del made[name]
    assert any(name in fault for fault in report_faults(made))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("median_ms", 1.0),
        ("median_ms", None),
        ("flagged", True),
        ("spread", 0.3),
        ("selection", "guessed"),
        ("context", "32k"),
        ("rss_bytes", None),
        ("step_ms", None),
        ("step_ms", [10.0] * 15),
        ("step_ms", [10.0] * 15 + ["10"]),
        ("steps", 15),
        ("serial_limit_ms", None),
        ("serial_limit_ms", 4.9),
        ("middle_limit_ms", None),
        ("middle_limit_ms", 4.9),
        ("memory_gbps", None),
        ("shadow_used", None),
        ("shadow", "int8"),
    ],
)
def test_a_wrong_row_is_found(name, value, tmp_path):
    made = report(rows(), tmp_path)
    made["rows"][0][name] = value
    assert report_faults(made)


@pytest.mark.parametrize(
    ("system", "asked", "used", "right"),
    [
        ("hillinfer", "int2", "int2", True),
        ("hillinfer-in-memory", "auto", "int4", True),
        ("hillinfer-in-memory", "int4", "int8", False),
        ("infinigen", "int4", None, True),
        ("infinigen", "int4", "int4", False),
    ],
)
def test_the_shadow_that_was_used_is_told(system, asked, used, right, tmp_path):
    row = measured_row(system, shadow=asked, shadow_used=used)
    faults = report_faults(report([row], tmp_path))
    assert faults == (
        []
        if right
        else [f"row {row.name!r}: shadow_used is {used!r} of {system}, shadow {asked!r}"]
    )


@pytest.mark.parametrize(("limit_ms", "beaten"), [(9.0, False), (9.4, False), (9.6, True)])
def test_a_row_faster_than_its_limit_is_flagged_with_the_reason(limit_ms, beaten, tmp_path):
    row = measured_row(limit_ms=limit_ms, serial_limit_ms=12.0, middle_limit_ms=12.0)
    told = report([row], tmp_path)
    assert report_faults(told) == []
    (found,) = told["rows"]
    assert found["flagged"] is beaten
    reasons = [f"fastest step 9 ms, below the limit of {limit_ms} ms"] if beaten else []
    assert [flag.split(": ")[0] for flag in found["flags"]] == reasons
    table = table_text([row], told)
    assert (f"flagged: hillinfer: {''.join(reasons)}: drive or memory" in table) is beaten
    assert f"| {limit_ms:.2f}{'!' if beaten else ' '}" in table
    # What the figures call for cannot be left out, nor said of quiet ones.
    found["flags"] = [] if beaten else ["noisy"]
    assert "its figures say" in report_faults(told)[0]


def test_a_row_has_every_reason_to_doubt_it():
    row = measured_row(median_ms=10.0, spread=0.25, limit_ms=20.0)
    assert [flag.split(",")[0] for flag in row.flags] == ["spread 25%", "fastest step 9 ms"]
    assert measured_row().flags == ()
    assert not measured_row(skipped="no room", min_ms=None, spread=None, limit_ms=None).flagged


@pytest.mark.parametrize(
    ("system", "chosen", "fault"),
    [
        ("hillinfer", "", True),
        ("hillinfer-in-memory", "", False),
        ("full-drive", "", True),
        ("infinigen", HELD_PROMPT, True),
        ("full-memory", "", False),
        ("transformers-dynamic", "", False),
        ("h2o-drop", "recent tokens kept", True),
        ("h2o-drop", f"last 64 queries of the prompt observed ({HELD_PROMPT})", False),
    ],
)
def test_more_than_the_budget_is_found_where_it_bounds(system, chosen, fault, tmp_path):
    row = measured_row(system, chosen=chosen, held_bytes=11, budget_bytes=10)
    faults = report_faults(report([row], tmp_path))
    assert [f"{row.name!r}: held_bytes 11 exceed budget_bytes 10" in one for one in faults] == (
        [True] if fault else []
    )
    assert report_faults(report([replace(row, held_bytes=10)], tmp_path)) == []


def test_an_unknown_system_is_found(tmp_path):
    assert "is not known" in report_faults(report([measured_row("h3o")], tmp_path))[0]


def test_two_rows_of_one_name_are_found(tmp_path):
    made = report(rows(), tmp_path)
    made["rows"].append(made["rows"][0])
    assert report_faults(made) == ["two rows have one name"]


def test_skipped_rows_say_why_in_report_and_table(tmp_path):
    made = [*rows(), replace(measured_row("quest"), median_ms=None, skipped="no room")]
    told = report(made, tmp_path)
    assert report_faults(told) == []
    text = table_text(made, told)
    assert "quest: no room" in text
    assert "8.56" in text


def write_drive_report(folder, engine, *others):
    def case(reference, own, ratio):
        given = {"median_mb_per_second": reference, "ratio_to_reference": 1.0}
        return {
            **dict.fromkeys(("reference", *others), given),
            engine: {"median_mb_per_second": own, "ratio_to_reference": ratio},
        }

    cases = {
        "rows of 1 KiB": case(100.0, 95.0, 0.95),
        "rows of 4 KiB": case(100.0, 90.0, 0.88),
        # Neither of them is what rows are read with, and the product never reads the last.
        "256 KiB": case(1900.0, 950.0, 0.5),
        "1024 KiB": case(2000.0, 200.0, 0.1),
    }
    (folder / "drive.json").write_text(json.dumps({"cases": cases}))


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_the_drive_is_named_by_the_rows_that_are_furthest_behind(tmp_path, engine):
    write_drive_report(tmp_path, engine)
    own, reference = drive_gbps(tmp_path), reference_gbps(tmp_path)
    assert (own.value, reference.value) == (pytest.approx(0.09), pytest.approx(0.1))
    assert own.row.startswith(
        "drive.json: rows of 4 KiB: 0.090 GB/s, 0.88 of the reference (rows' worst ratio of "
        f"{engine} to the reference; longest reads, 256 KiB: 0.950 GB/s, 0.50 of the reference), "
        f"{engine}, median"
    )
    assert reference.row.startswith("drive.json: rows of 4 KiB: 0.100 GB/s (")
    assert "256 KiB: 1.900 GB/s)" in reference.row
    assert "1024 KiB" not in own.row + reference.row


def test_fio_is_told_where_it_was_there(tmp_path):
    write_drive_report(tmp_path, "uring")
    assert fio_gbps(tmp_path).value is None
    assert fio_gbps(tmp_path).row == "drive.json: fio was not installed where make drive ran"
    write_drive_report(tmp_path, "uring", "fio")
    assert fio_gbps(tmp_path).value == pytest.approx(0.1)


def test_a_drive_report_without_rows_is_of_another_form(tmp_path):
    (tmp_path / "drive.json").write_text(json.dumps({"cases": {"1024 KiB": {}}}))
    assert drive_gbps(tmp_path).value is None
    assert "another form" in drive_gbps(tmp_path).row


def test_figures_of_other_reports_are_taken_from_beside_the_report(tmp_path):
    write_drive_report(tmp_path, "uring")
    (tmp_path / "scorer.json").write_text("{")
    assert drive_gbps(tmp_path).value == pytest.approx(0.09)
    assert reference_gbps(tmp_path).value == pytest.approx(0.1)
    assert scorer_gbps(tmp_path).value is None
    assert "run make scorer again" in scorer_gbps(tmp_path).row


BETA = {
    "label": "measured: device core",
    "processor": "made",
    "threads": 1,
    "shape": "llama-3.2-1b",
    "layers": 16,
    "tokens": 4096,
    "alpha": 0.1,
    "shadow": "int4",
    "max_selected": 512,
    "dram_budget": "100%",
    "chosen_host_segments": 3,
    "beta_regret": 0.125,
    "rows": [
        {
            "name": name, "host_segments": host, "beta": beta, "seconds": seconds,
            "median_seconds": 2 * seconds, "modelled_seconds": {"parallel": seconds / 2},
        }
        for name, host, beta, seconds in (
            ("0", 0, 0.0, 0.5), ("4", 4, None, 0.25), ("auto", 3, 3.0, 0.28),
        )
    ],
}  # fmt: skip


def test_the_sweep_over_beta_is_in_report_table_and_pictures(tmp_path):
    (tmp_path / "beta.json").write_text(json.dumps(BETA))
    made = report(rows(), tmp_path)
    assert report_faults(made) == []
    assert made["beta_regret"] == pytest.approx(0.125)
    assert "beta.json" in made["scalars"]["beta_regret"]["row"]
    assert [row["seconds"] for row in made["beta"]["rows"]] == [0.5, 0.25, 0.28]
    text = table_text(rows(), made)
    assert "auto: 3" in text
    assert "all on the host" in text
    assert "280.00" in text
    assert "beta" in bench_figures(rows(), made["beta"])


def _absent(beta, name):
    del beta[name]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda beta: beta.update(beta_regret=0.5), "beta_regret"),
        (lambda beta: beta.update(tokens="4096"), "tokens"),
        (lambda beta: beta.update(label="measured"), "label"),
        (lambda beta: beta.update(chosen_host_segments=2), "no row auto"),
        (lambda beta: beta.update(rows=[]), "no row auto"),
        (lambda beta: _absent(beta, "shape"), "shape"),
        (lambda beta: beta["rows"].append(3), "row 3"),
        (lambda beta: beta["rows"][1].update(beta="all"), "row 1: beta"),
        (lambda beta: beta["rows"][0].update(median_seconds=0.1), "row 0: seconds"),
        (lambda beta: beta["rows"][0]["modelled_seconds"].update(parallel=None), "parallel"),
    ],
)
def test_a_wrong_sweep_over_beta_is_found(spoil, told, tmp_path):
    (tmp_path / "beta.json").write_text(json.dumps(BETA))
    made = report(rows(), tmp_path)
    spoil(made["beta"])
    faults = report_faults(made)
    assert faults
    assert all(fault.startswith("beta: ") for fault in faults)
    assert told in faults[0]
    assert report_faults(report(rows(), tmp_path) | {"beta": 3})
    del made["beta"]
    assert report_faults(made) == ["beta is missing; null says that it was not measured"]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"rows": [{"name": 1}]}'])
def test_without_a_sweep_over_beta_there_is_a_reason(text, tmp_path):
    if text is not None:
        (tmp_path / "beta.json").write_text(text)
    made = report(rows(), tmp_path)
    assert report_faults(made) == []
    assert made["beta"] is None
    assert made["beta_regret"] is None
    assert "make beta" in made["scalars"]["beta_regret"]["row"]
    assert "auto:" not in table_text(rows(), made)
    assert "beta" not in bench_figures(rows(), made["beta"])


def test_pictures_are_those_that_rows_have_something_for():
    assert set(bench_figures(rows())) == {"latency", "speedup"}
    made = rows() + [replace(row, batch=4) for row in rows()]
    made += [replace(row, context=4096) for row in rows()] + [measured_row("hillinfer-hie")]
    names = {"latency", "speedup", "ablation"}
    names |= {f"{name}-opt-6.7b" for name in ("batch", "throughput", "context")}
    names |= {f"{name}-llama-13b" for name in ("batch", "throughput", "context")}
    assert set(bench_figures(made)) == names
    assert bench_figures([]) == {}
