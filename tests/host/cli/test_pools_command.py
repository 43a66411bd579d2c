# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench pools`, through its own entry point."""

import json

import pytest

TEXT = "".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(90))
SMALL = ("--context", 700, "--last", 6, "--alpha", 0.3)


@pytest.fixture
def pools(command, tiny_folder, tmp_path):
    """Run the command on the tiny model."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return lambda *more: command("pools", "--model", tiny_folder, "--texts", text, *more)


@pytest.mark.bench
def test_a_table_a_report_and_a_picture(pools, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    file = tmp_path / "new" / "pools.json"
    outcome = pools(*SMALL, "--out", file, "--threads", 2)
    assert outcome.code == 0, outcome.err
    assert "text.txt: 12/12 tokens" in outcome.err
    assert "replay: 12/12 tokens" in outcome.err
    assert "| decayed " in outcome.out
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["label"] == "measured"
    assert (report["context"], report["last"], report["texts"]) == (700, 6, ["text.txt"])
    assert report["earlier"]["rows"]
    # Two kinds of traces, three sizes of pools, five policies, one by misses, three bounds.
    assert len(report["rows"]) == len(report["means"]) == 2 * 3 * 9
    assert len(outcome.out.splitlines()) == 2 + len(report["means"])
    kinds = {(row["rule"], row["shadow"]) for row in report["rows"]}
    assert kinds == {("weight_sum", "int4"), ("raw_sum", "int8")}
    for row in report["rows"]:
        assert row.keys() >= {"policy", "pool_alphas", "alpha", "hit_rate", "text", "sizes"}
        assert 0 < row["hit_rate"] <= 1
    assert file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--alpha", 0), "alpha=0.0 must be above 0"),
        (("--alpha", 1), "alpha=1.0 selects everything"),
        (("--context", 300, "--last", 300), "last=300 must be at least 1 and below context=300"),
        (("--threads", 0), "threads=0 must be at least 1"),
        (("--context", 9000), "context=9000 is longer than the 4096 positions"),
        (("--context", 3500), "tokens but --context 3500 needs 3501"),
        (("--out", "pools.png"), "is for JSON"),
        (("--out", "/dev/null/pools.json"), "choose another --out"),
    ],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(arguments, message, pools):
    assert message in pools(*arguments).error_line()


def test_exact_and_coded_tokens_share_one_memory(pools, tmp_path):
    file = tmp_path / "splits.json"
    coded = ("--exact", "0.02", "--threads", 1)
    outcome = pools(*SMALL, *coded, "--dram-budget", "64MiB", "--out", file)
    assert outcome.code == 0, outcome.err
    report = json.loads(file.read_text(encoding="utf-8"))
    assert {(row["exact"], row["budget"]) for row in report["rows"]} == {(0.02, "64MiB")}
    # The budget's parts, and nine shares before two that follow what is wanted.
    parts, _, *lines = outcome.out.splitlines()
    assert parts.startswith("M0 64MiB of 700 tokens")
    assert len(lines) == 2 + len(report["rows"]) == 2 + 9 + 2
    assert [row["follows"] for row in report["rows"][8:]] == [None, "hits", "reads"]
    # There are no more codes than tokens of tables, and then nothing is missed.
    assert report["rows"][8]["code_misses"] == 0
    # The twin: without codes each coded token is missed.
    assert report["rows"][0]["code_misses"] > 0
    assert "too small" in pools(*SMALL, *coded, "--dram-budget", "1KiB").error_line()
