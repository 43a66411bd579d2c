# SPDX-License-Identifier: Apache-2.0
"""Traces of requests as files."""

import json
import lzma

import pytest
from request_traces import random_trace, write_trace

from hillinfer_bench.traces.request_trace import CARRIED_TRACES, RequestTrace, TraceError

LINE = {"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [7, 9]}


@pytest.mark.parametrize(
    ("name", "requests", "distinct"),
    [("conversation", 12_031, 182_790), ("synthetic", 3_993, 43_924)],
)
def test_the_traces_that_come_along_are_whole(name, requests, distinct):
    trace = RequestTrace.carried(name)
    assert (len(trace.requests), trace.distinct) == (requests, distinct)
    assert name in CARRIED_TRACES


def test_a_trace_is_read_as_it_was_written_plain_or_compressed(tmp_path):
    made = random_trace(name="made")
    plain = write_trace(tmp_path / "made.jsonl", made)
    packed = tmp_path / "made.jsonl.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert RequestTrace.read(plain) == RequestTrace.read(packed) == made
    assert RequestTrace.read(write_trace(plain, random_trace(seed=1, name="made"))) != made


def test_blocks_are_numbered_by_their_first_sight(tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(LINE) + "\n\n")
    (request,) = RequestTrace.read(file).requests
    assert (request.blocks, request.time, request.tokens) == ((0, 1), 0.005, 600)
    assert [request.tokens_of(count) for count in (0, 1, 2)] == [0, 512, 600]


@pytest.mark.parametrize(
    "lines",
    [
        "no JSON",
        "[1]",
        json.dumps({**LINE, "hash_ids": [7]}),
        json.dumps({**LINE, "hash_ids": "79"}),
        json.dumps({**LINE, "input_length": 0, "hash_ids": []}),
        json.dumps({**LINE, "timestamp": -1}),
        json.dumps({**LINE, "timestamp": 1e999}),
        json.dumps({**LINE, "timestamp": float("nan")}),
        json.dumps(LINE) + "\n" + json.dumps({**LINE, "timestamp": 4}),
        json.dumps(LINE) + "\n" + json.dumps({**LINE, "hash_ids": [8, 9]}),
        json.dumps({**LINE, "hash_ids": [7, 7]}),
        "[" * 100_000,
    ],
)
def test_what_is_no_trace_is_one_error(tmp_path, lines):
    file = tmp_path / "bad.jsonl"
    file.write_text(lines)
    with pytest.raises(TraceError, match="is no trace of requests"):
        RequestTrace.read(file)


def test_a_file_that_is_not_there_or_cut_off_is_one_error(tmp_path):
    with pytest.raises(TraceError):
        RequestTrace.read(tmp_path / "none.jsonl")
    cut = tmp_path / "cut.jsonl.xz"
    cut.write_bytes(lzma.compress(json.dumps(LINE).encode())[:-8])
    with pytest.raises(TraceError):
        RequestTrace.read(cut)
