# SPDX-License-Identifier: Apache-2.0
"""The timeline of the pools as a file, written and read back."""

import threading
import warnings
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from hillinfer.errors import HillInferWarning, SettingsError
from hillinfer.trace.recorder import LayerStep
from hillinfer.trace.trace_file import COLUMNS, PoolTimeline
from hillinfer_bench.figures.timeline_figures import TimelineError, TimelineRecord

HEADER = ",".join(COLUMNS)
FULL_DRIVE = Path("/dev/full")


def entry(step, layer, hot=3, cold=1):
    return LayerStep(step, layer, 100 + step, hot, cold, cold, cold, 2, 4096, 0.25, 30, 4)


def written(file, entries):
    timeline = PoolTimeline(file)
    for one in entries:
        timeline.observe(one)
    timeline.close()
    return file


def test_what_was_observed_is_read_back(tmp_path):
    entries = [entry(step, layer, hot=step, cold=layer) for step in (5, 6, 9) for layer in range(4)]
    file = written(tmp_path / "t.csv", entries)
    lines = file.read_text().splitlines()
    assert lines[0] == HEADER
    assert lines[1] == "5,0,105,5,0,0,0,2,4096,0.250000,30,4"
    assert len(lines) == 1 + len(entries)
    record = TimelineRecord.read(file)
    assert record.steps.tolist() == [5, 6, 9]
    for one in entries:
        place = one.layer, record.steps.tolist().index(one.step)
        values = [record.columns[name][place] for name in COLUMNS[2:]]
        assert values == list(astuple(one)[2:])
        assert record.hit_rates[place] == one.hot_rows / (one.hot_rows + one.cold_rows)
    assert record.hit_rate == (5 + 6 + 9) * 4 / ((5 + 6 + 9) * 4 + 6 * 3)


def test_sequences_of_one_step_are_added_and_missing_lines_are_not_zeros(tmp_path):
    file = written(tmp_path / "t.csv", [entry(1, 0), entry(1, 0), entry(2, 1)])
    record = TimelineRecord.read(file)
    assert record.columns["hot_rows"][0, 0] == 6
    assert np.isnan(record.columns["hot_rows"]).tolist() == [[False, True], [True, False]]


def test_only_the_owner_may_read_it(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("older and open to all")
    file.chmod(0o644)
    written(file, [entry(1, 0)])
    assert file.stat().st_mode & 0o777 == 0o600
    assert "older" not in file.read_text()


def test_lines_of_many_threads_stay_whole(tmp_path):
    timeline = PoolTimeline(tmp_path / "t.csv")

    def observe(layer):
        for step in range(500):
            timeline.observe(entry(step, layer))

    threads = [threading.Thread(target=observe, args=(layer,)) for layer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    columns = TimelineRecord.read(tmp_path / "t.csv").columns
    assert columns["hot_rows"].shape == (4, 500)
    assert (columns["hot_rows"] == 3).all()


def test_close_brings_everything_and_may_come_twice(tmp_path):
    file = tmp_path / "t.csv"
    timeline = PoolTimeline(file)
    timeline.observe(entry(1, 0))
    assert file.read_text() == ""
    for _ in range(2):
        timeline.close()
        timeline.observe(entry(2, 0))
    assert len(file.read_text().splitlines()) == 2


def test_a_full_drive_is_told_once_and_stops_nothing():
    if not FULL_DRIVE.exists():
        pytest.skip("no /dev/full: it is part of Linux")
    timeline = PoolTimeline(FULL_DRIVE)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(1000):
            timeline.observe(entry(step, 0))
        timeline.close()
    # Whatever else is collected meanwhile may warn, too.
    (one,) = (one for one in told if issubclass(one.category, HillInferWarning))
    assert "ends early: No space left on device" in str(one.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timeline.observe(entry(1, 0))
        timeline.close()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "none").touch()
    with pytest.raises(SettingsError, match="choose another --pool-timeline"):
        PoolTimeline(tmp_path / "none" / "t.csv")


LINE = "1,0,100,3,1,1,1,2,4096,0.25,30,4"


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(f"{HEADER}\n{LINE}\n2,0,10")
    assert TimelineRecord.read(file).steps.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its first line must be step,layer"),
        ("a,b\n1,2\n", "its first line must be step,layer"),
        (f"{HEADER}\n", "holds no steps"),
        (f"{HEADER}\n1,0,10\n", "line 2"),
        (f"{HEADER}\n{LINE}\n1,0,10\n{LINE}\n", "line 3"),
        (f"{HEADER}\n{LINE},7\n{LINE}\n", "line 2"),
        (f"{HEADER}\n{LINE.replace('4096', '-1')}\n{LINE}\n", "line 2"),
        (f"{HEADER}\n{LINE.replace('0.25', 'nan')}\n{LINE}\n", "line 2"),
        (f"{HEADER}\n{LINE.replace('0.25', 'inf')}\n{LINE}\n", "line 2"),
        (f"{HEADER}\n{LINE.replace('3', '3.5', 1)}\n{LINE}\n", "line 2"),
        (f"{HEADER}\n1,99999999{LINE[3:]}\n", "names layer"),
        (f"{HEADER}\n{LINE}é\n", "is no pool timeline"),
        (f"{HEADER}\n{LINE}\0\n{LINE}\n", "t.csv"),
    ],
)
def test_bad_files_are_refused_with_the_place(text, message, tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(TimelineError, match=message):
        TimelineRecord.read(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TimelineError, match="No such file"):
        TimelineRecord.read(tmp_path / "none.csv")
