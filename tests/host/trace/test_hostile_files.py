# SPDX-License-Identifier: Apache-2.0
"""Timelines, traces and images that somebody made up: one line, soon, with little memory."""

import json
import os
import resource
import struct
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from made_xclbin import make

from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin, XclbinError, recorded_spec
from hillinfer.errors import HillInferError
from hillinfer.trace.trace_file import COLUMNS, PROCESS_NAME
from hillinfer_bench.figures.canvas import require_matplotlib
from hillinfer_bench.figures.timeline_figures import TimelineError, TimelineRecord
from hillinfer_bench.figures.trace_figures import TraceError, TraceRecord

HUGE = "9" * 400
# Address space above what is taken now: more than is needed, less than a wrong size takes.
ROOM = 4 << 30


@contextmanager
def little_memory():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(call, error):
    with little_memory(), pytest.raises(error) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000
    return str(caught.value)


# --- places that are no files ---------------------------------------------------------------------

READERS = {
    "timeline": (TimelineRecord.read, TimelineError),
    "trace": (TraceRecord.read, TraceError),
    "xclbin": (Xclbin.read, XclbinError),
}


def a_pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def a_sparse_file(folder):
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 1 << 42)
    return folder / "sparse"


def a_line_without_end(folder):
    (folder / "line").touch()
    os.truncate(folder / "line", 3 << 20)
    return folder / "line"


def a_link_in_a_circle(folder):
    (folder / "link").symlink_to(folder / "link")
    return folder / "link"


PLACES = {
    "pipe": a_pipe,
    "sparse": a_sparse_file,
    "line": a_line_without_end,
    "circle": a_link_in_a_circle,
    "folder": lambda folder: folder,
    "device": lambda _: Path("/dev/zero"),
    "missing": lambda folder: folder / "missing",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", READERS)
def test_a_place_that_is_no_such_file(tmp_path, kind, place):
    read, error = READERS[kind]
    file = PLACES[place](tmp_path)
    assert str(file) in refused(lambda: read(file), error)


# --- timelines ------------------------------------------------------------------------------------


def cells(**changes):
    return ",".join(str({**dict.fromkeys(COLUMNS, 1), **changes}[name]) for name in COLUMNS)


TIMELINES = {
    "huge number": [cells(step=HUGE)] * 2,
    "endless": [cells(hot_rows="1" * 5000)] * 2,
    "below zero": [cells(reads=-1)] * 2,
    "layers and steps": [cells(step=number, layer=number) for number in range(1000)],
    "layer far out": [cells(layer=1 << 50)],
    "many layers": [cells(layer=number) for number in range(2000)],
    "no text": ["\udcff" * 5],
}


@pytest.mark.parametrize("case", TIMELINES)
def test_a_timeline_that_was_made_up(tmp_path, case):
    file = tmp_path / "pools.csv"
    lines = [",".join(COLUMNS), *TIMELINES[case]]
    file.write_bytes("\n".join([*lines, ""]).encode("utf-8", "surrogateescape"))
    refused(lambda: TimelineRecord.read(file), TimelineError)


# --- traces ---------------------------------------------------------------------------------------


def event(**changes):
    plain = {
        "ph": "X", "cat": "steps", "name": "step", "ts": 1, "dur": 5, "tid": 1,
        "args": {"step": 1, "tokens": 1},
    }  # fmt: skip
    return plain | changes


def in_step(number, **changes):
    plain = {"cat": "reads", "name": "rows", "ts": 2, "dur": 1, "tid": number, "args": {"step": 1}}
    return event(**plain | changes)


EVENTS = {
    "huge time": [event(ts=int(HUGE))] * 2,
    "endless time": [event(dur=float("inf"))] * 2,
    "formula": [event(), *[in_step(1, name="$\\frac$")] * 2],
    "formula in details": [event(args={"step": 1, "layer": "$\\frac$"})] * 2,
    "long name": [event(), *[in_step(1, name="n" * 5000)] * 2],
    "control characters": [event(), *[in_step(1, name="a\x1b[2J")] * 2],
    "list": [[1]] * 2,
    "other lane": [event(cat="nothing")] * 2,
    "details": [event(args={"step": 1, "layer": [1]})] * 2,
    "threads": [event(), *[in_step(number) for number in range(300)]],
}


@pytest.mark.parametrize("case", EVENTS)
def test_a_trace_that_was_made_up(tmp_path, case):
    file = tmp_path / "trace.json"
    head = {"ph": "M", "args": {"name": PROCESS_NAME}}
    lines = [json.dumps(one) + "," for one in (head, *EVENTS[case])]
    file.write_text("\n".join(["[", *lines, ""]))
    refused(lambda: TraceRecord.read(file).step(1), TraceError)


def test_deep_json_in_a_trace(tmp_path):
    file = tmp_path / "trace.json"
    head = json.dumps({"ph": "M", "args": {"name": PROCESS_NAME}})
    file.write_text(f"[\n{head},\n{'[' * 100_000}\n{'[' * 100_000}\n")
    refused(lambda: TraceRecord.read(file), TraceError)


def test_a_formula_in_the_name_of_a_file_is_a_name(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    require_matplotlib()
    from hillinfer_bench.figures.canvas import save_figure
    from hillinfer_bench.figures.timeline_figures import timeline_figure

    file = tmp_path / "$\\frac$.csv"
    file.write_text(",".join(COLUMNS) + "\n" + cells(layer=0) + "\n")
    save_figure(timeline_figure(TimelineRecord.read(file), file.name), tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


# --- images ---------------------------------------------------------------------------------------

ENTRY = 40


def changed_section(index, at, value):
    content = bytearray(make().pack())
    struct.pack_into("<Q", content, table_of(content) + index * ENTRY + at, value)
    return bytes(content)


def table_of(content):
    """Where the kind, name, offset and size of each section begin."""
    return content.index(struct.pack("<I16s", 0, b"BITSTREAM"))


def lying_on_another():
    content = make().pack()
    (first,) = struct.unpack_from("<Q", content, table_of(content) + 24)
    return changed_section(1, 24, first + 8)


IMAGES = {
    "offset": lambda: changed_section(1, 24, 1 << 60),
    "size": lambda: changed_section(1, 32, (1 << 64) - 1),
    "both": lambda: changed_section(1, 24, (1 << 64) - 8),
    "in the header": lambda: changed_section(1, 24, 16),
    "on another": lying_on_another,
    "cut short": lambda: make().pack()[:500],
    "half": lambda: make().pack()[: len(make().pack()) // 2],
}


@pytest.mark.parametrize("case", IMAGES)
def test_an_image_that_was_made_up(tmp_path, case):
    content = IMAGES[case]()
    assert content != make().pack()
    refused(lambda: Xclbin.unpack(content, "kernels.xclbin"), XclbinError)


RECORDS = {
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 50_000,
    "no UTF-8": b'{"format": "\xff"}',
    "list": b"[]",
    "number": b"7",
    "long format": json.dumps({"format": "f" * 10_000}).encode(),
    "huge number": b'{"format": ' + b"9" * 10_000 + b"}",
}
SPECS = {
    "no object": 7,
    "other names": {"nothing": 1},
    "huge": {"head_dim": 10**300, "kv_heads": 1, "group_size": 1},
    "text": {"head_dim": "x" * 10_000, "kv_heads": 1, "group_size": 1},
    "list": {"head_dim": 64, "kv_heads": 1, "group_size": 1, "key_mode": [1]},
    "object": {"head_dim": {}, "kv_heads": [], "group_size": None},
    "endless": {"head_dim": float("inf"), "kv_heads": 1, "group_size": 1},
}


def with_record(content):
    own = make()
    return replace(own, sections={**own.sections, SectionKind.USER_METADATA: content})


@pytest.mark.parametrize("case", [*RECORDS, *SPECS])
def test_a_record_that_was_made_up(case):
    content = RECORDS.get(case)
    if content is None:
        content = json.dumps({"format": "hillinfer-kernels-1", "spec": SPECS[case]}).encode()
    refused(lambda: recorded_spec(with_record(content), "kernels.xclbin"), HillInferError)
