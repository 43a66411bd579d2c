# SPDX-License-Identifier: Apache-2.0
"""`make prefill`: what its report is made of, and a run over a tiny model."""

import json
import sys

import pytest
from tiny_folder import save_tiny

import prefill_bench
from prefill_bench import OURS, RIVAL, Reading, summary


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


def test_the_bench_writes_a_report(tmp_path, cold_dir, monkeypatch, capsys):
    model, out = save_tiny(tmp_path / "model"), tmp_path / "prefill.json"
    arguments = ["--model", model, "--contexts", "70", "--chunk", "32", "--rounds", "1"]
    arguments += ["--budgets", "1KiB", "64MiB", "--cold-dir", cold_dir, "--out", out]
    monkeypatch.setattr(sys, "argv", ["prefill_bench", *map(str, arguments)])
    prefill_bench.main()
    report = json.loads(out.read_text())
    # A budget that cannot hold the buffers is said to be refused, and the others go on.
    assert [row["contender"] for row in report["rows"]] == [RIVAL, "hillinfer 64MiB"]
    assert "hillinfer 1KiB   refused: the DRAM budget" in capsys.readouterr().out
    assert report["goal"]["ratio_at_most"] == 1.1
    assert report["goal"]["worst_ratio"] == report["rows"][1]["seconds_ratio"]
