# SPDX-License-Identifier: Apache-2.0
"""`make prefill`: what its report is made of, and a run over a tiny model."""

import json

import pytest
from tiny_folder import save_tiny

import prefill_bench
from prefill_bench import OURS, RIVAL, Reading, Refusal, goal_records, summary


def readings(*seconds):
    return [Reading(one, one / 2) for one in seconds]


def test_ratios_are_taken_round_by_round():
    """A round in which the machine was slow for everyone changes no ratio."""
    ours, rival = summary(
        100, {f"{OURS} 1GiB": readings(2.0, 20.0, 2.2), RIVAL: readings(1.0, 10.0, 2.0)}
    )
    assert ours.seconds_ratio == pytest.approx(2.0)
    assert ours.cpu_ratio == pytest.approx(2.0)
    assert ours.fastest == Reading(2.0, 1.0)
    assert ours.median == Reading(2.2, 1.1)
    assert rival.seconds_ratio == 1.0


def test_a_round_that_was_slower_for_one_alone_counts():
    ours, _ = summary(100, {OURS: readings(2.0, 6.0, 6.0), RIVAL: readings(2.0, 2.0, 2.0)})
    assert ours.seconds_ratio == pytest.approx(3.0)


def test_rounds_that_lie_apart_are_flagged_and_so_is_a_single_one():
    steady, apart = [10.0, 10.5, 11.0], [10.0, 10.5, 14.0]
    row, rival = summary(100, {OURS: readings(*steady), RIVAL: readings(*steady)})
    assert (row.flagged, rival.flagged) == (False, False)
    # Between the 10th and the 90th percentile, over the median.
    assert row.spread == pytest.approx(0.8 / 10.5)
    row, rival = summary(100, {OURS: readings(*apart), RIVAL: readings(*steady)})
    assert (row.flagged, rival.flagged) == (True, False)
    assert row.as_dict()["flagged"] is True
    row, _ = summary(100, {OURS: readings(1.0), RIVAL: readings(1.0)})
    assert (row.spread, row.flagged) == (None, True)


def goal(ratios, *, share=1.2, ours=(), rival=(), refused=()):
    """Return the goal of a budget with so many times the rival's time at each context."""
    rows = []
    for tokens, ratio in enumerate(ratios, 100):
        base, own = (rival or (10.0, 10.0, 10.0)), (ours or (10.0, 10.0, 10.0))
        rows += summary(
            tokens,
            {
                f"{OURS} 9MiB": [Reading(ratio * one, one, share) for one in own],
                RIVAL: readings(*base),
            },
        )
    (record,) = goal_records(["9MiB"], rows, refused)
    return record


def test_the_goal_is_judged_by_the_worst_context():
    record = goal([1.05, 1.1, 0.9])
    assert (record["reached"], record["met"], record["flagged"]) == (1.1, True, False)
    assert record["row"] == "hillinfer 9MiB at 101 tokens"
    assert goal([1.05, 1.11, 0.9])["met"] is False


def test_a_budget_smaller_than_the_rows_stands_beside_and_is_not_judged():
    assert goal([1.05], share=1.0)["met"] is True
    for ratio in (1.05, 5.0):
        record = goal([ratio], share=0.99)
        assert (record["reached"], record["met"]) == (ratio, None)
        assert record["reason"] == "not judged: the budget is 99% of the rows' bytes"


def test_flagged_rows_of_either_side_meet_no_goal():
    apart = (10.0, 10.0, 15.0)
    assert goal([1.05])["met"] is True
    for sides in ({"ours": apart}, {"rival": apart}):
        record = goal([1.05], **sides)
        assert (record["met"], record["flagged"]) == (False, True)


def test_a_context_that_was_refused_is_not_met_and_one_that_missed_is_missed():
    lacking = (Refusal(f"{OURS} 9MiB", 999, "too small"),)
    record = goal([1.05], refused=lacking)
    assert (record["met"], record["reason"]) == (None, "999 tokens refused: too small")
    assert goal([1.5], refused=lacking)["met"] is False
    record = goal([], refused=lacking)
    assert [record[name] for name in ("reached", "row", "met", "flagged")] == [None] * 4
    assert record["reason"] == "999 tokens refused: too small"


def run(model, out, cold_dir, *budgets, rounds=1):
    arguments = ["--model", model, "--contexts", "70", "--chunk", "32", "--rounds", rounds]
    arguments += ["--budgets", *budgets, "--cold-dir", cold_dir, "--out", out]
    prefill_bench.main([str(one) for one in arguments])
    return json.loads(out.read_text())


def test_the_bench_writes_a_report(tmp_path, cold_dir, monkeypatch, capsys):
    model, out = save_tiny(tmp_path / "model"), tmp_path / "prefill.json"
    report = run(model, out, cold_dir, "1KiB", "64MiB", rounds=2)
    # A budget that cannot hold the buffers is said to be refused, and the others go on.
    assert [row["contender"] for row in report["rows"]] == [RIVAL, "hillinfer 64MiB"]
    assert "hillinfer 1KiB   refused: the DRAM budget" in capsys.readouterr().out
    (refused,) = report["refused"]
    assert (refused["contender"], refused["tokens"]) == ("hillinfer 1KiB", 70)
    rival, ours = report["rows"]
    assert rival["budget_share"] is None
    # The tiny model's rows are a few KiB.
    assert ours["budget_share"] > 100
    assert ours["spread"] is not None
    small, large = report["goals"]
    assert (small["reached"], small["met"]) == (None, None)
    assert "the DRAM budget" in small["reason"]
    assert large["reached"] == round(ours["seconds_ratio"], 3)
    assert large["row"] == "hillinfer 64MiB at 70 tokens"
    assert large["flagged"] == (ours["flagged"] or rival["flagged"])
    assert large["met"] is (large["reached"] <= 1.1 and not large["flagged"])
    assert "at most x1.10" in large["goal"]


def test_a_report_is_written_where_the_last_budget_is_refused(
    tmp_path, cold_dir, monkeypatch, capsys
):
    model, out = save_tiny(tmp_path / "model"), tmp_path / "prefill.json"
    report = run(model, out, cold_dir, "64MiB", "1KiB")
    assert [row["contender"] for row in report["rows"]] == [RIVAL, "hillinfer 64MiB"]
    assert [one["met"] for one in report["goals"]][1] is None
    assert "70 tokens refused: the DRAM budget" in report["goals"][1]["reason"]
    assert "hillinfer 1KiB: None: not judged; 70 tokens refused" in capsys.readouterr().out
