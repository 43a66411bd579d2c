# SPDX-License-Identifier: Apache-2.0
"""Goals that the other benchmarks' reports tell of, and files that are absent, old or broken."""

import json

import pytest
from bench_cases import measured_row

from hillinfer_bench.decode.rates import MachineRates
from hillinfer_bench.report.bench_report import bench_report
from hillinfer_bench.report.other_reports import OTHER_GOALS, other_goal_records
from hillinfer_bench.report.report_check import report_faults

FILES = {other.file: other for other in OTHER_GOALS}


def prefill(ratio=1.05):
    """Return a report as `make prefill` writes it without goals."""
    rows = [
        {"contender": name, "tokens": tokens, "seconds_ratio": value}
        for tokens, value in ((2048, 1.01), (7800, ratio))
        for name in ("ordinary", "hillinfer 25%", "hillinfer 120%")
    ]
    return {
        "rows": [
            row | ({"seconds_ratio": 9.0} if "25" in row["contender"] else {}) for row in rows
        ],
        "goal": {"contender": "hillinfer 120%", "ratio_at_most": 1.1, "worst_ratio": ratio},
    }


def compared(peer, met, speedups=None, flagged=(), crossing=9000.0):
    """Return a comparison as `make peers` writes it."""
    return {
        "ours": "hillinfer", "peer": peer, "speedups": speedups or {"2048": 0.5, "8000": 1.2},
        "crossover": {"kind": "between measured contexts", "context": crossing},
        "missing": [], "flagged": list(flagged), "goal": "as aimed", "met": met,
    }  # fmt: skip


def peers(*comparisons, **skipped):
    return {"comparisons": list(comparisons), "skipped": skipped}


def scorer(int4=0.85):
    """Return a report as `make scorer` writes it."""
    shares = {"int8": 0.9, "int4": int4, "int2": 0.3}
    return {
        "rows": [
            {
                "shape": "llama-3.1-8b", "key_mode": mode, "native_of_bandwidth": share,
                "bytes": 512 << 20,
            }
            for mode, share in shares.items()
        ]
    }  # fmt: skip


def drive(blocks=0.85):
    """Return a report as `make drive` writes it."""
    return {
        "goal_ratio_to_reference": 0.8,
        "cases": {
            "rows of 1 KiB": {
                "reference": {"ratio_to_reference": 1.0},
                "threads": {"ratio_to_reference": 0.95},
            },
            "1024 KiB": {
                "reference": {"ratio_to_reference": 1.0},
                "uring": {"ratio_to_reference": blocks},
                "threads": {"ratio_to_reference": 0.1},
            },
        },
    }


def beta(regret=0.04):
    """Return what a goal needs of a report as `make beta` writes it."""
    return {"beta_regret": regret, "goal": 0.05, "label": "measured: core", "max_selected": 512}


SPACE = {
    "points": [{"beyond_m0_bytes": -(1 << 20)}, {"beyond_m0_bytes": 3 << 20}],
    "largest_unexplained_share": 0.14,
}


def records(folder, file, found):
    """Write a report and return its records."""
    (folder / file).write_text(json.dumps(found), encoding="utf-8")
    return [one for one in other_goal_records(folder) if one.row.startswith(file)]


@pytest.mark.parametrize(
    ("file", "found", "reached", "met", "row"),
    [
        ("prefill.json", prefill(), 1.05, True, "hillinfer 120%, 7800 tokens"),
        ("prefill.json", prefill(1.2), 1.2, False, "hillinfer 120%, 7800 tokens"),
        ("scorer.json", scorer(), 0.85, True, "llama-3.1-8b int4, 512 MiB"),
        ("scorer.json", scorer(0.75), 0.75, False, "llama-3.1-8b int4, 512 MiB"),
        ("scorer.json", {"rows": []}, None, None, "no row"),
        ("drive.json", drive(), 0.85, True, "1024 KiB, uring"),
        ("drive.json", drive(0.7), 0.7, False, "1024 KiB, uring"),
        ("drive.json", drive(0.99), 0.95, True, "rows of 1 KiB, threads"),
        ("beta.json", beta(), 0.04, True, "max_selected 512"),
        ("beta.json", beta(0.06), 0.06, False, "max_selected 512"),
    ],
)
def test_figures_of_other_reports_are_judged_by_their_worst_row(
    file, found, reached, met, row, tmp_path
):
    (record,) = records(tmp_path, file, found)
    assert (record.reached, record.met, record.flagged) == (reached, met, None)
    assert record.goal == FILES[file].goals[0]
    assert row in record.row
    assert record.row.endswith("UTC")


@pytest.mark.parametrize(
    ("comparison", "reached", "met", "flagged"),
    [
        (compared("transformers static", True), 1.2, True, False),
        (compared("transformers static", True, flagged=[2048]), 1.2, True, False),
        (compared("transformers static", None, flagged=[8000]), 1.2, None, True),
        (
            compared("transformers dynamic", False, {"4096": 0.9, "8000": 1.2}),
            0.9,
            False,
            False,
        ),
        (compared("transformers dynamic", None, {"1024": 0.4}), 0.4, None, False),
        (compared("llama.cpp", True), 9000.0, True, False),
        (compared("llama.cpp", None, crossing=None), None, None, False),
        (compared("vllm", None, flagged=[2048]), 9000.0, None, True),
    ],
)
def test_peers_say_where_hillinfer_is_ahead_or_crosses(comparison, reached, met, flagged, tmp_path):
    found = records(tmp_path, "peers.json", peers(comparison))
    (record,) = [one for one in found if f"hillinfer beside {comparison['peer']}" in one.goal]
    assert (record.reached, record.met, record.flagged) == (reached, met, flagged)
    # The two others were not compared with.
    assert [one.met for one in found if one is not record] == [None, None]


def test_peers_that_were_skipped_say_why(tmp_path):
    found = records(
        tmp_path,
        "peers.json",
        peers(compared("transformers static", True), **{"llama.cpp": "no compiler"}),
    )
    told = {one.goal: one.row for one in found if one.reached is None}
    assert len(told) == 2
    for goal, row in told.items():
        why = (
            "was skipped: no compiler" if "llama.cpp" in goal else "nothing was compared with vllm"
        )
        assert why in row


def test_an_older_space_report_is_told_and_not_judged(tmp_path):
    growth, flat = records(tmp_path, "space_lengths.json", SPACE)
    assert (growth.reached, growth.met) == (0.14, None)
    assert (flat.reached, flat.met) == (3.0, None)
    assert "states no goals of its own" in growth.row


OWN = {"goal": "aim", "reached": 2.0, "row": "some row", "met": True, "flagged": False}


@pytest.mark.parametrize("file", FILES)
def test_a_reports_own_goals_are_taken(file, tmp_path):
    (record,) = records(tmp_path, file, {"goals": [OWN]})
    assert (record.goal, record.reached, record.met, record.flagged) == ("aim", 2.0, True, False)
    assert record.row.startswith(f"{file}: some row, written ")
    unknown = OWN | {"reached": None, "row": None, "met": None, "flagged": None}
    (record,) = records(tmp_path, file, {"goals": [unknown]})
    assert (record.met, record.flagged) == (None, None)
    (record,) = records(tmp_path, file, {"goals": [OWN | {"flagged": True}]})
    assert (record.met, record.flagged) == (False, True)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "is not beside the report: run make"),
        ("{", "is no JSON: run make"),
        ('{"goals": NaN}', "is no JSON"),
        ("[]", "has another form: run make"),
        ("3", "has another form"),
        ("{}", "has another form"),
        ('{"goals": [3]}', "has another form"),
        ('{"goals": [{"goal": "aim"}]}', "has another form"),
        (json.dumps({"goals": [OWN | {"reached": "2"}]}), "has another form"),
        (json.dumps({"goals": [OWN | {"met": 3}]}), "has another form"),
        (json.dumps({"goals": [OWN | {"reached": 1.5}]}).replace("1.5", "1e999"), "another form"),
        ('{"rows": 3, "cases": 3, "comparisons": [3], "points": [], "goal": 3}', "another form"),
    ],
)
def test_absent_old_and_broken_reports_give_reasons(file, text, reason, tmp_path):
    if text is not None:
        (tmp_path / file).write_text(text, encoding="utf-8")
    made = bench_report(
        [measured_row()], {}, MachineRates(memory=1e9, drive=1e9), [], tmp_path / "bench.json"
    )
    assert report_faults(made) == []
    json.dumps(made, allow_nan=False)
    own = [goal for goal in made["goals"] if goal["row"].startswith(file)]
    assert tuple(goal["goal"] for goal in own) == FILES[file].goals
    for goal in own:
        assert reason in goal["row"]
        assert (goal["reached"], goal["met"], goal["flagged"]) == (None, None, None)


@pytest.mark.parametrize("file", FILES)
def test_goals_of_a_file_that_are_missing_are_found(file, tmp_path):
    made = bench_report(
        [measured_row()], {}, MachineRates(memory=1e9, drive=1e9), [], tmp_path / "bench.json"
    )
    made["goals"] = [goal for goal in made["goals"] if not goal["row"].startswith(file)]
    assert report_faults(made) == [f"goals of {file} are missing"]
