# SPDX-License-Identifier: Apache-2.0
"""A run's record: what it adds up and how it is written."""

import io
import json

import pytest
from rich.console import Console

from hillinfer.cli.report import show_report
from hillinfer.errors import Finish
from hillinfer.generate.run_report import Answer, Comparison, RunReport
from hillinfer.statistics import CacheStatistics
from hillinfer.system.files import ReportError

STATISTICS = CacheStatistics(
    kv_bytes=1000 << 20,
    dram_budget_bytes=250 << 20,
    dram_peak_bytes=240 << 20,
    hot_bytes=100 << 20,
    shadow_bytes=120 << 20,
    staging_bytes=15 << 20,
    other_bytes=5 << 20,
    cold_reads=77,
    cold_read_bytes=3 << 30,
    cold_useful_bytes=1 << 30,
    cold_write_bytes=1000 << 20,
    shadow_read_bytes=0,
    shadow_write_bytes=0,
    hot_rows_read=30,
    cold_rows_read=10,
    promoted_rows=9,
    demoted_rows=8,
    host_to_device_bytes=0,
    device_to_host_bytes=0,
    drive_wait_seconds=2.5,
    selected_tokens=40,
    scored_tokens=400,
    device_scored_tokens=300,
    kernel_launches=12,
    device_lost=False,
    fp16_overflows=7,
    io_mode="direct",
    io_engine="uring",
    layer_hit_rates=(0.75, 0.5, 1.0),
)


def answer(tokens, seconds, question="why [bold]?"):
    return Answer(
        question=question,
        text="because [red]so[/red]",
        token_ids=tuple(range(tokens)),
        question_tokens=5,
        question_seconds=1.0,
        decode_seconds=seconds,
        finish=Finish.LENGTH,
        decode_counts={"cold_read_bytes": 100, "cold_useful_bytes": 50, "drive_wait_seconds": 0.5},
    )


def report(**changes):
    facts = {
        "model": {"name": "tiny", "model_type": "llama", "dtype": "float32"},
        "settings": {
            "alpha": 0.1,
            "rule": "weight_sum",
            "scope": "layer",
            "shadow": "int4",
            "device": "nvme",
            "pool_policy": "decayed",
            "pool_sizes": "equal",
        },
        "sampling": {"temperature": 0.0},
        "versions": {"python": "3.11"},
        "machine": {"gpu": None},
        "document_tokens": 90,
        "document_seconds": 8.0,
        "answers": (answer(11, 2.0), answer(1, 0.0)),
        "statistics": STATISTICS,
        "peak_rss_bytes": 2 << 30,
    }
    return RunReport(**(facts | changes))


def test_sums_and_rates():
    one = report()
    assert one.prompt_tokens == 100
    assert one.new_tokens == 12
    assert one.prefill_seconds == 10.0
    assert one.prefill_tokens_per_second == 10.0
    # Ten forward passes in two seconds: each answer's first token comes out of reading.
    assert one.decode_tokens_per_second == 5.0
    assert one.decode_counts["cold_read_bytes"] == 200
    assert one.decode_counts["cold_write_bytes"] == 0


def test_rates_without_decode_are_zero():
    assert report(answers=(answer(1, 0.0),)).decode_tokens_per_second == 0.0


def test_written_file_is_what_the_report_says(tmp_path):
    file = tmp_path / "deep" / "run.json"
    report().write(file)
    written = json.loads(file.read_text())
    assert written["hot_hit_rate"] == 0.75
    assert written["selected_share"] == 0.1
    assert written["decode"]["drive_wait_seconds"] == 1.0
    assert written["answers"][0]["finish"] == "length"
    assert written["answers"][0]["token_ids"] == list(range(11))
    assert written["comparison"] is None
    report(document_tokens=1).write(file)
    assert json.loads(file.read_text())["document_tokens"] == 1
    assert [one.name for one in file.parent.iterdir()] == ["run.json"]


def test_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="choose another --report"):
        report().write(tmp_path / "file" / "run.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ReportError, match="choose another --report"):
        report().write(tmp_path / "folder")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


def shown(one):
    console = Console(width=120, record=True, markup=False, file=io.StringIO())
    show_report(one, console)
    return console.export_text()


def test_view_says_every_part():
    text = shown(report())
    for said in (
        "100 prompt, 12 new",
        "peak 240.0 MiB of a budget of 250.0 MiB (25% of the KV cache)",
        "hot rows 100.0 MiB, shadow 120.0 MiB, staging 15.0 MiB, other 5.0 MiB",
        "75.0% of selected rows were hot",
        "3.0 GiB read for 1.0 GiB asked for",
        "10.0% of the context per step",
        "7 values were too large",
        "waited 2.5 s",
    ):
        assert said in text
    assert "GPU" not in text


def test_view_shows_model_text_as_it_is():
    comparison = Comparison(
        prefill_seconds=1.0,
        decode_tokens_per_second=2.0,
        kv_bytes=1 << 20,
        peak_rss_bytes=1 << 30,
        hillinfer_peak_rss_bytes=1 << 30,
        texts=("[green]", "x"),
        equal_tokens=(3, 1),
        equal_answers=1,
    )
    text = shown(report(comparison=comparison))
    assert "[green]" in text
    assert "because [red]so[/red]" in text
    assert "first 3 of 11 tokens equal" in " ".join(text.split())
