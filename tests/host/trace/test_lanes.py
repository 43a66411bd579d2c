# SPDX-License-Identifier: Apache-2.0
"""Spans of all lanes as a file that trace viewers open."""

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
from trace_events import NotNestedError, check, check_nested, ends, load, spans

from hillinfer.errors import HillInferWarning, SettingsError
from hillinfer.trace.recorder import SILENT, Lane
from hillinfer.trace.trace_file import Lanes, TraceFile

FULL_DRIVE = Path("/dev/full")
# Records until it is killed; says when a step is in the file.
ENDLESS = """
import sys
from pathlib import Path
from hillinfer.trace.recorder import Lane
from hillinfer.trace.trace_file import Lanes
from hillinfer.trace.trace_file import TraceFile
lanes, step = Lanes(TraceFile(Path(sys.argv[1]))), 0
while True:
    step += 1
    lanes.begin_step(step)
    for layer in range(20):
        with lanes.span(Lane.COMPUTE, "model", layer=layer):
            pass
    if step == 5:
        print("going", flush=True)
"""
# Records into a file that may not grow beyond 4,096 bytes.
LIMITED = """
import resource, sys, warnings
from pathlib import Path
from hillinfer.trace.recorder import Lane
from hillinfer.trace.trace_file import Lanes
from hillinfer.trace.trace_file import TraceFile
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
lanes = Lanes(TraceFile(Path(sys.argv[1])))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for step in range(50):
        lanes.begin_step(step)
        for layer in range(5):
            with lanes.span(Lane.COMPUTE, "model", layer=layer):
                pass
    lanes.close()
print(len(told), told[0].message)
"""


def recorded(file):
    lanes = Lanes(TraceFile(file))
    for step in (1, 2):
        lanes.begin_step(step)
        with lanes.span(Lane.STEPS, "outer", layer=step):
            with lanes.span(Lane.STEPS, "inner"):
                pass
            with lanes.span(Lane.READS, "rows", layer=step, bytes=4096):
                pass
    lanes.close()
    return load(file)


def test_events_are_what_viewers_want(tmp_path):
    events = recorded(tmp_path / "t.json")
    check(events)
    outer, inner = (spans(events, "steps", name) for name in ("outer", "inner"))
    assert [one["args"] for one in outer] == [{"step": 1, "layer": 1}, {"step": 2, "layer": 2}]
    assert [one["args"] for one in inner] == [{"step": 1}, {"step": 2}]
    assert spans(events, "reads")[1]["args"] == {"step": 2, "layer": 2, "bytes": 4096}
    assert ends(outer[0])[0] <= ends(inner[0])[0] <= ends(inner[0])[1] <= ends(outer[0])[1]
    assert len(events) == 1 + 2 * 2 + 3 * 2


@pytest.mark.parametrize("field", ["name", "ts", "dur", "pid", "tid", "args"])
def test_a_missing_field_is_found(field, tmp_path):
    """The twin of the check above."""
    events = recorded(tmp_path / "t.json")
    del spans(events)[-1][field]
    with pytest.raises((AssertionError, KeyError)):
        check(events)


def test_spans_that_overlap_are_found(tmp_path):
    """The twin of the check above."""
    outer, inner = spans(recorded(tmp_path / "t.json"), "steps")[1::-1]
    check_nested([outer, inner])
    late = copy.copy(inner)
    late["dur"] = outer["dur"] + 1
    with pytest.raises(NotNestedError):
        check_nested([outer, late])


def test_a_span_takes_as_long_as_its_block(tmp_path):
    lanes = Lanes(TraceFile(tmp_path / "t.json"))
    before = time.perf_counter_ns()
    with suppress(KeyError), lanes.span(Lane.COMPUTE, "breaks off"):
        time.sleep(0.02)
        raise KeyError
    took = time.perf_counter_ns() - before
    lanes.note(Lane.COMPUTE, "noted", before, before + 1234567)
    lanes.close()
    broken, noted = spans(load(tmp_path / "t.json"))
    assert 20e6 <= ends(broken)[1] - ends(broken)[0] <= took
    assert (noted["name"], noted["dur"]) == ("noted", 1234.567)


def test_a_span_belongs_to_the_step_it_began_in(tmp_path):
    lanes = Lanes(TraceFile(tmp_path / "t.json"))
    lanes.begin_step(7)
    with lanes.span(Lane.COPIES, "promote"):
        lanes.begin_step(8)
    lanes.close()
    assert spans(load(tmp_path / "t.json"))[0]["args"]["step"] == 7


def test_threads_have_rows_of_their_own(tmp_path):
    lanes = Lanes(TraceFile(tmp_path / "t.json"))
    met = threading.Barrier(4)

    def work(number):
        met.wait()
        for _ in range(300):
            with lanes.span(Lane.READS, "outer", thread=number), lanes.span(Lane.READS, "inner"):
                pass
            if number == 0:
                lanes.begin_step(1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lanes.close()
    events = load(tmp_path / "t.json")
    check(events)
    outer = spans(events, name="outer")
    assert len(spans(events)) == 2 * len(outer) == 2 * 4 * 300
    assert len({(one["tid"], one["args"]["thread"]) for one in outer}) == 4


def test_memory_stays_bounded_without_steps(tmp_path):
    lanes = Lanes(TraceFile(tmp_path / "t.json"), most_waiting=50)
    for noted in range(1, 501):
        with lanes.span(Lane.READS, "rows"):
            pass
        # What is not in the file is in memory.
        assert noted - len(spans(load(tmp_path / "t.json"))) < 50
    assert len(spans(load(tmp_path / "t.json"))) == 500
    lanes.close()


def test_only_the_owner_may_read_it(tmp_path):
    file = tmp_path / "t.json"
    file.write_text("older and open to all, and longer than what comes" * 100)
    file.chmod(0o644)
    recorded(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert "older" not in file.read_text()


def test_of_two_that_write_at_once_the_last_stays_whole(tmp_path):
    file = tmp_path / "t.json"
    older = Lanes(TraceFile(file))
    with older.span(Lane.READS, "older"):
        pass
    newer = Lanes(TraceFile(file))
    with newer.span(Lane.READS, "newer"):
        pass
    older.close()
    newer.close()
    assert [one["name"] for one in spans(load(file))] == ["newer"]


def test_close_may_come_twice_and_nothing_follows(tmp_path):
    file = tmp_path / "t.json"
    lanes = Lanes(TraceFile(file))
    for _ in range(2):
        lanes.close()
        with lanes.span(Lane.READS, "rows"):
            pass
        lanes.begin_step(1)
    assert [one["ph"] for one in load(file)] == ["M"]


def test_a_killed_process_leaves_a_whole_file(tmp_path):
    file = tmp_path / "t.json"
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "going\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    events = load(file)
    check(events)
    assert len(spans(events)) >= 4 * 20


def test_a_file_that_may_not_grow_ends_whole(tmp_path):
    file = tmp_path / "t.json"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(file)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("1 ")
    assert "ends early: File too large; generation goes on" in done.stdout
    events = load(file)
    check(events)
    assert 5 <= len(spans(events)) < 50


def test_a_full_drive_is_told_once_and_stops_nothing():
    if not FULL_DRIVE.exists():
        pytest.skip("no /dev/full: it is part of Linux")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lanes = Lanes(TraceFile(FULL_DRIVE))
        for step in range(5):
            lanes.begin_step(step)
            with lanes.span(Lane.READS, "rows"):
                pass
        lanes.close()
    # Whatever else is collected meanwhile may warn, too.
    (one,) = (one for one in told if issubclass(one.category, HillInferWarning))
    assert "the trace /dev/full ends early: No space left on device" in str(one.message)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "none").touch()
    with pytest.raises(SettingsError, match="choose another --trace"):
        TraceFile(tmp_path / "none" / "t.json")


def test_the_silent_recorder_keeps_what_blocks_raise():
    SILENT.begin_step(1)
    with SILENT.span(Lane.READS, "outer"), SILENT.span(Lane.READS, "inner"):
        SILENT.note(Lane.READS, "noted", 0, 1)
    with pytest.raises(KeyError), SILENT.span(Lane.READS, "outer"):
        raise KeyError
    SILENT.close()


def test_names_are_written_as_they_are(tmp_path):
    lanes = Lanes(TraceFile(tmp_path / "t.json"))
    with lanes.span(Lane.READS, 'ä"\n\\', file="β\n"):
        pass
    lanes.close()
    (one,) = spans(load(tmp_path / "t.json"))
    assert (one["name"], one["args"]["file"]) == ('ä"\n\\', "β\n")
    # A line each, whatever is in them: reading goes by lines.
    lines = (tmp_path / "t.json").read_text().splitlines()
    assert len(lines) == 2 + len(load(tmp_path / "t.json"))
    assert json.loads(lines[1].rstrip(","))["pid"] == os.getpid()
