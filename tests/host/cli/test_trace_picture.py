# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate --trace`, and one step of it in words and as a picture."""

import struct
import time
from xml.etree import ElementTree

import pytest
from trace_events import check, load, spans

from hillinfer_bench.figures.trace_figures import TraceRecord

LEAST = ("--question", "which cat?", "--dram-budget", "auto", "--shadow", "int4")


@pytest.fixture
def trace(ask_tiny, tmp_path):
    """A trace of the tiny model, and the report of its run."""
    file = tmp_path / "new" / "trace.json"
    outcome, report = ask_tiny(*LEAST, "--trace", file)
    assert "warning: the trace" not in outcome.err
    return file, report


def test_trace_and_report_agree(trace, ask_tiny):
    file, report = trace
    events = load(file)
    check(events)
    assert file.stat().st_mode & 0o777 == 0o600
    record = TraceRecord.read(file)
    assert len(record.decode_steps) == report["new_tokens"] - 1
    read = sum(one["args"]["bytes"] for one in spans(events, "reads", "rows"))
    assert read == report["cold_read_bytes"] > 0
    _, untraced = ask_tiny(*LEAST)
    assert untraced["answers"][0]["token_ids"] == report["answers"][0]["token_ids"]


@pytest.mark.usefixtures("_no_matplotlib")
def test_words_of_the_median_step_need_no_matplotlib(trace, command):
    outcome = command("trace-picture", trace[0])
    assert outcome.code == 0, outcome.err
    record = TraceRecord.read(trace[0])
    count = len(record.decode_steps)
    first, heads, *rows = outcome.out.splitlines()
    assert first.startswith(f"step {record.median_step} (the median of {count} decode steps): ")
    assert heads.split()[:2] == ["lane", "busy"]
    assert [row[:16].strip() for row in rows] == [
        *("compute", "host scoring", "device scoring", "reads", "copies", "writes"),
        "bubbles",
    ]
    assert rows[0].split()[2] == "ms"
    assert rows[2].split() == ["device", "scoring", "-"]


def test_the_step_that_is_asked_for(trace, command):
    (first, *_) = TraceRecord.read(trace[0]).steps
    outcome = command("trace-picture", trace[0], "--step", first.step)
    assert outcome.out.startswith(f"step {first.step} (one of "), outcome.err
    assert f"{first.details['tokens']} new token(s)" in outcome.out.splitlines()[0]


def test_picture_as_png(trace, command, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    out = tmp_path / "pictures" / "step.png"
    outcome = command("trace-picture", trace[0], "--out", out)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == str(out)
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", data[16:24])) > 300


def test_picture_as_svg(trace, command, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    out = tmp_path / "step.SVG"
    assert command("trace-picture", trace[0], "--out", out).code == 0
    assert ElementTree.parse(out).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_bars_are_the_spans_of_the_step(trace):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    from hillinfer.trace.recorder import Lane
    from hillinfer_bench.figures.trace_figures import lanes_figure

    record = TraceRecord.read(trace[0])
    step = record.step(record.median_step)
    (axes,) = lanes_figure(step, "t.json").axes
    labels = [label.get_text().split(":")[0] for label in axes.get_yticklabels()]
    assert list(dict.fromkeys(labels)) == [lane.value for lane in Lane]
    bars = sum(len(one.get_paths()) for one in axes.collections)
    assert bars == len(step.spans) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.json",), "cannot read the trace none.json: No such file or directory"),
        (("document.txt",), "its first line must be ["),
        (("new/trace.json", "--step", "999"), "has no step 999: choose one of 1"),
        (("new/trace.json", "--out", "/dev/null/p.png"), "choose another --out"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, trace, command, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    monkeypatch.chdir(tmp_path)
    outcome = command("trace-picture", *arguments)
    assert message in outcome.error_line()


@pytest.mark.usefixtures("_no_matplotlib")
def test_without_matplotlib_the_fix_is_said_at_once(trace, command, tmp_path):
    outcome = command("trace-picture", trace[0], "--out", tmp_path / "p.png")
    assert "pip install 'hillinfer[figures]'" in outcome.error_line()
    assert outcome.out == ""


def test_a_place_that_cannot_be_written(command, document, tiny_folder):
    outcome = command(
        *("generate", "--model", tiny_folder, "--prompt-file", document),
        *("--trace", "/dev/null/t.json"),
    )
    assert "choose another --trace" in outcome.error_line()


def test_a_killed_run_leaves_a_trace_with_a_picture(
    started, command, tiny_folder, cold_dir, document, tmp_path
):
    file = tmp_path / "t.json"
    process = started(
        *("generate", "--model", tiny_folder, "--prompt-file", document, "--cold-dir", cold_dir),
        *("--max-new-tokens", 3000, "--dram-budget", "64MiB", "--threads", 1, "--trace", file),
        *("--temperature", 5),
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and b'"tokens":1}' not in (
        file.read_bytes() if file.exists() else b""
    ):
        time.sleep(0.05)
    process.kill()
    _, err = process.communicate(timeout=60)
    check(load(file))
    assert TraceRecord.read(file).decode_steps, err.decode()
    assert command("trace-picture", file).code == 0
