# SPDX-License-Identifier: Apache-2.0
"""Pool options of `hillinfer generate`, and the pictures of pools."""

import struct

import pytest

from hillinfer_bench.figures.timeline_figures import TimelineRecord

LAYERS = 2
LEAST = ("--question", "which cat?", "--dram-budget", "auto", "--shadow", "int4")


def png_size(file):
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.fixture
def timeline(ask_tiny, tmp_path):
    """A timeline of the tiny model, and the report of its run."""
    file = tmp_path / "new" / "timeline.csv"
    outcome, report = ask_tiny(*LEAST, "--pool-timeline", file)
    assert "warning: the pool timeline" not in outcome.err
    return file, report, outcome


def test_timeline_and_report_agree(timeline):
    file, report, outcome = timeline
    record = TimelineRecord.read(file)
    steps = report["new_tokens"] - 1
    assert record.columns["hot_rows"].shape == (LAYERS, steps)
    sums = {name: int(values.sum()) for name, values in record.columns.items()}
    assert sums["cold_rows"] == report["cold_rows_read"] > 0
    assert sums["hot_rows"] == report["hot_rows_read"]
    assert sums["promoted"] == report["promoted_rows"]
    assert sums["demoted"] == report["demoted_rows"]
    assert sums["reads"] <= report["cold_reads"]
    rates = report["layer_hit_rates"]
    hot, cold = record.columns["hot_rows"].sum(1), record.columns["cold_rows"].sum(1)
    assert rates == pytest.approx((hot / (hot + cold)).tolist())
    assert f"{min(rates):.1%} in layer {rates.index(min(rates))}" in outcome.err
    assert f"{report['promoted_rows']} rows promoted" in outcome.err


def test_policy_and_sizes_are_in_the_report_and_change_no_token(ask_tiny):
    found = []
    for policy, sizes in (("decayed", "equal"), ("lru", "misses"), ("paper", "equal")):
        _, report = ask_tiny(*LEAST, "--pool-policy", policy, "--pool-sizes", sizes)
        assert (report["settings"]["pool_policy"], report["settings"]["pool_sizes"]) == (
            policy,
            sizes,
        )
        found.append(report["answers"][0]["token_ids"])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--pool-policy", "mru"), "pool_policy='mru' is unknown: choose one of decayed, lru,"),
        (("--pool-sizes", "big"), "pool_sizes='big' is unknown: choose one of equal, misses"),
        (("--pool-timeline", "/dev/null/t.csv"), "choose another --pool-timeline"),
    ],
)
def test_bad_options_are_one_line(option, message, command, document, tiny_folder):
    outcome = command("generate", "--model", tiny_folder, "--prompt-file", document, *option)
    assert message in outcome.error_line()


def test_picture_of_a_timeline(timeline, command, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    out = tmp_path / "pictures" / "timeline.png"
    outcome = command("pool-picture", timeline[0], "--out", out)
    assert (outcome.code, outcome.out) == (0, f"{out}\n"), outcome.err
    width, height = png_size(out)
    assert min(width, height) > 500


def test_picture_of_something_else(command, document, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    outcome = command("pool-picture", document, "--out", tmp_path / "p.png")
    assert "is no pool timeline" in outcome.error_line()
    assert not (tmp_path / "p.png").exists()


def test_picture_that_cannot_be_written(timeline, command):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    outcome = command("pool-picture", timeline[0], "--out", "/dev/null/p.png")
    assert "choose another --out" in outcome.error_line()


@pytest.mark.usefixtures("_no_matplotlib")
@pytest.mark.parametrize(
    "arguments", [("pool-picture", "t.csv", "--out", "p.png"), ("pools", "--out", "pools.json")]
)
def test_without_matplotlib_the_fix_is_said_at_once(arguments, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    outcome = command(*arguments)
    assert "pip install 'hillinfer[figures]'" in outcome.error_line()
    assert not list(tmp_path.iterdir())
