# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench traces`, through its own entry point."""

import json

import pytest
from request_traces import random_trace, write_trace


@pytest.fixture
def traces(command, tmp_path):
    """Run the command on a small trace."""
    file = write_trace(tmp_path / "small.jsonl", random_trace(requests=60))
    return lambda *more: command("traces", "--trace", file, *more)


def test_tables_and_a_report(traces, tmp_path):
    file = tmp_path / "new" / "traces.json"
    outcome = traces("--capacities", 0.1, "--capacities", 0.3, "--copies", 4, "--out", file)
    assert outcome.code == 0, outcome.err
    assert "| small | saved  | adaptive  |" in outcome.out
    assert "modelled: 1 PB" in outcome.out
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["label"] == "measured"
    assert report["scale"]["label"].startswith("modelled")
    assert {row["share"] for row in report["rows"]} == {0.1, 0.3}
    assert len(report["verdicts"]) == 2
    least = min(one["product_over_lru"] for one in report["verdicts"])
    assert report["saved_seconds_over_lru"] == least
    assert [row["copies"] for row in report["scale"]["rows"]] == [1, 4]
    for row in report["rows"]:
        assert 0 <= row["tokens"] <= 1
        assert 0 <= row["seconds"] <= 1


def test_no_copies_no_model(traces):
    outcome = traces("--capacities", 0.2, "--copies", 0, "--processes", 1)
    assert outcome.code == 0, outcome.err
    assert "modelled" not in outcome.out


def test_an_index_is_filled_where_it_is_asked_for(traces, tmp_path):
    file = tmp_path / "traces.json"
    outcome = traces("--capacities", 0.2, "--copies", 0, "--index-chunks", 40, "--out", file)
    assert outcome.code == 0, outcome.err
    assert "GB of index" in outcome.out
    index = json.loads(file.read_text(encoding="utf-8"))["index"]
    assert index["rows"][-1]["chunks"] >= 40
    assert index["rebuilt"][0]["chunks"] == 40
    assert not list(tmp_path.glob("hillinfer-index-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--capacities", 0), "capacities=0.0 must be above 0 and at most 1"),
        (("--capacities", 1.5), "capacities=1.5 must be above 0 and at most 1"),
        (("--copies", -1), "copies=-1 must be 0 to 100"),
        (("--index-chunks", -1), "index_chunks=-1 must be 0 or more"),
        (("--processes", 0), "processes=0 must be at least 1"),
        (("--trace", "none.jsonl"), "none.jsonl is no trace of requests"),
        (("--out", "/dev/null/traces.json"), "choose another --out"),
    ],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(arguments, message, traces):
    assert message in traces(*arguments).error_line()


def test_a_report_does_not_replace_its_trace(traces, tmp_path):
    assert "both name" in traces("--out", tmp_path / "small.jsonl").error_line()
