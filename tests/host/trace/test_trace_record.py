# SPDX-License-Identifier: Apache-2.0
"""A trace read back: which steps there are, what went on in one, and what is no trace."""

import threading

import pytest

from hillinfer.trace.recorder import Lane, Span
from hillinfer.trace.trace_file import TraceFile
from hillinfer_bench.figures.trace_figures import StepTrace, TraceError, TraceRecord, step_text

MS = 1_000_000


def step(number, start, stop, tokens=1):
    return Span(Lane.STEPS, "step", start, stop, threading.get_ident(), number, {"tokens": tokens})


def span(lane, start, stop, number=1, thread=5, **details):
    return Span(lane, "work", start, stop, thread, number, details)


def written(file, spans):
    trace = TraceFile(file)
    first = trace.origin
    trace.append([Span(*one[:2], one.start + first, one.stop + first, *one[4:]) for one in spans])
    trace.close()
    return file


@pytest.fixture
def record(tmp_path):
    """Prefill, then decode steps of 5, 2 and 3 ms, the last with work of the one before."""
    spans = [
        step(1, 0, 50 * MS, tokens=64),
        step(2, 60 * MS, 65 * MS),
        step(3, 70 * MS, 72 * MS),
        span(Lane.COMPUTE, 71 * MS, 72 * MS, 3, layer=0),
        span(Lane.COPIES, 71 * MS, 81 * MS, 3, layer=1),
        step(4, 80 * MS, 83 * MS),
        span(Lane.READS, 81 * MS + 7, 82 * MS, 4, layer=0, bytes=4096),
    ]
    return TraceRecord.read(written(tmp_path / "t.json", spans))


def test_steps_and_the_median_of_those_that_decode(record):
    assert [one.step for one in record.steps] == [1, 2, 3, 4]
    assert [one.step for one in record.decode_steps] == [2, 3, 4]
    assert record.median_step == 4


def test_the_faster_of_two_middle_steps_and_any_where_none_decodes(tmp_path):
    both = [step(2, 0, 5 * MS), step(3, 6 * MS, 9 * MS)]
    assert TraceRecord.read(written(tmp_path / "t.json", both)).median_step == 3
    read = [step(7, 0, 5 * MS, tokens=9)]
    assert TraceRecord.read(written(tmp_path / "t.json", read)).median_step == 7


def test_a_step_has_what_went_on_while_it_did(record):
    trace = record.step(4)
    assert [(one.lane, one.step, one.details) for one in trace.spans] == [
        (Lane.COPIES, 3, {"layer": 1}),
        (Lane.READS, 4, {"layer": 0, "bytes": 4096}),
    ]
    assert trace.spans[1].stop - trace.spans[1].start == MS - 7
    # Cut where the step begins.
    assert trace.busy(Lane.COPIES) == MS
    assert trace.busy(Lane.COMPUTE) == 0


@pytest.mark.parametrize(("number", "there"), [(5, "1, 2, 3, 4"), (-1, "1, 2, 3, 4")])
def test_a_step_that_is_not_there(number, there, record):
    with pytest.raises(TraceError, match=f"no step {number}: choose one of {there}"):
        record.step(number)


def trace_of(*spans):
    return StepTrace(step(1, 0, 100), spans)


@pytest.mark.parametrize(
    ("reads", "busy", "hidden"),
    [
        ([(10, 20)], 10, 10),
        ([(30, 60)], 30, 20),
        ([(35, 45)], 10, 5),
        ([(31, 39)], 8, 0),
        ([(10, 20), (15, 30)], 20, 20),
        ([(0, 100), (10, 20)], 100, 80),
        ([(-50, 10), (90, 200)], 20, 10),
        ([], 0, 0),
    ],
)
def test_busy_and_hidden_time(reads, busy, hidden):
    """Compute from 0 to 30 and from 40 to 90, the latter in two spans."""
    compute = [(0, 30), (40, 70), (60, 90)]
    spans = [span(Lane.COMPUTE, *one) for one in compute] + [
        span(Lane.READS, *one) for one in reads
    ]
    trace = trace_of(*spans)
    assert trace.busy(Lane.COMPUTE) == 80
    assert (trace.busy(Lane.READS), trace.hidden(Lane.READS)) == (busy, hidden)


def test_nothing_hides_behind_compute_that_is_not_there():
    """The twin: without compute the same reads are bare."""
    trace = trace_of(span(Lane.READS, 10, 20), span(Lane.HOST_SCORING, 0, 90))
    assert (trace.busy(Lane.READS), trace.hidden(Lane.READS)) == (10, 0)


def test_words():
    trace = StepTrace(
        step(1, 0, 100 * MS),
        (
            span(Lane.COMPUTE, 0, 60 * MS),
            span(Lane.READS, 50 * MS, 70 * MS, bytes=4096),
            span(Lane.READS, 65 * MS, 75 * MS, thread=6, bytes=4096),
        ),
    )
    lines = [line.split() for line in step_text(trace, "one of 3").splitlines()]
    assert lines[0][:6] == ["step", "1", "(one", "of", "3):", "100.000"]
    rows = {line[0]: line for line in lines[2:]}
    assert rows["compute"] == ["compute", "60.000", "ms", "60.0%", "1"]
    assert rows["reads"] == ["reads", "25.000", "ms", "25.0%", "2", "40.0%", "8.0", "KiB"]
    assert rows["writes"] == ["writes", "-"]


HEAD = '[\n{"name":"process_name","ph":"M","ts":0,"pid":1,"tid":0,"args":{"name":"hillinfer"}}'
EVENT = (
    '{"name":"step","cat":"steps","ph":"X","ts":1.5,"dur":2,"pid":1,"tid":1,'
    '"args":{"step":1,"tokens":1}}'
)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    file = tmp_path / "t.json"
    file.write_text(f"{HEAD},\n{EVENT},\n{EVENT[:30]}")
    assert [one.step for one in TraceRecord.read(file).steps] == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its first line must be \\["),
        ("{}\n", "its first line must be \\["),
        ("[\n]\n", "holds no whole step"),
        (f"{HEAD}\n]\n", "holds no whole step"),
        (f"{HEAD},\n{EVENT[:30]}\n{EVENT}\n]\n", "line 3: .* is no event of a trace"),
        (f"{HEAD},\n{EVENT}\n]\n{EVENT}\n", "line 4: a trace ends at its closing bracket"),
        (f"{HEAD},\n{EVENT.replace('2', '-2')},\n{EVENT}\n]\n", "line 3"),
        (f"{HEAD},\n{EVENT.replace('1.5', 'NaN')},\n{EVENT}\n]\n", "line 3"),
        (f"{HEAD},\n{EVENT.replace('1.5', '1e300')},\n{EVENT}\n]\n", "line 3"),
        (f"{HEAD},\n{EVENT.replace('steps', 'spets')},\n{EVENT}\n]\n", "line 3"),
        (f"{HEAD},\n{EVENT.replace('X', 'B')},\n{EVENT}\n]\n", "line 3"),
        (f"{HEAD},\n{EVENT.replace('1,', '[],')},\n{EVENT}\n]\n", "line 3"),
        (f"{HEAD},\n7,\n{EVENT}\n]\n", "line 3"),
        (f"{HEAD.replace('hillinfer', 'other')},\n{EVENT}\n]\n", "line 2"),
        (f"{HEAD},\n\udce9{EVENT}\n", "is no trace of hillinfer"),
    ],
)
def test_bad_files_are_refused_with_the_place(text, message, tmp_path):
    file = tmp_path / "t.json"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(TraceError, match=message):
        TraceRecord.read(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        TraceRecord.read(tmp_path / "none.json")
