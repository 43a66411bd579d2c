# SPDX-License-Identifier: Apache-2.0
"""What a drive gives by size, and what follows from what it loses by mixing."""

import json

import pytest

from hillinfer.drive.read_turns import Apart, Beside
from hillinfer.errors import ColdPoolError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.schedule.drive_rates import DriveMeasuring, DriveRates
from hillinfer.schedule.kept_windows import DENSE_PASSES, KeptWindows, WindowKey
from hillinfer.schedule.windows import SlackTable

MIB = 1 << 20
RATES = DriveRates((MIB // 16, MIB), (0.2e9, 1.0e9), 0.5e9, 0.6)
SHAPE = ModelShape(
    layers=2,
    kv_heads=1,
    query_heads=1,
    head_dim=16,
    stored_type=StoredType.FLOAT16,
    max_positions=9,
)


def test_between_sizes_the_rate_follows_the_logarithm():
    assert RATES.read(MIB // 16) == 0.2e9
    assert RATES.read(MIB // 4) == pytest.approx(0.6e9)
    assert RATES.read(64 * MIB) == RATES.read(MIB) == 1.0e9
    assert RATES.read_seconds(10**9, MIB) == pytest.approx(1.0)


def test_a_drive_that_loses_by_mixing_keeps_writes_apart():
    assert isinstance(RATES.mixing(), Apart)
    assert isinstance(DriveRates((MIB,), (1e9,), 1e9, 0.0).mixing(), Beside)


@pytest.mark.parametrize(
    "given",
    [
        ((), (), 1.0, 0.0),
        ((1, 2), (1.0,), 1.0, 0.0),
        ((2, 1), (1.0, 1.0), 1.0, 0.0),
        ((1,), (0.0,), 1.0, 0.0),
        ((1,), (1.0,), 1.0, 1.5),
        ((1,), (1.0,), 1.0, float("nan")),
    ],
)
def test_what_is_no_curve_is_refused(given):
    with pytest.raises(ValueError, match=r"curve|ascend|between"):
        DriveRates(*given)


def test_a_real_drive_is_measured_and_kept(tmp_path):
    kept = KeptWindows(tmp_path / "rates" / "windows.json")
    assert kept.drive(tmp_path) is None
    found = kept.measure_drive(tmp_path)
    assert min(*found.reads, found.write) > 1e6
    assert KeptWindows(kept.file).drive(tmp_path) == found
    assert found != DriveRates(found.sizes, found.reads, 2 * found.write, found.mixing_loss)
    assert [one.name for one in tmp_path.iterdir()] == ["rates"]


def test_a_drive_that_fails_says_so(tmp_path):
    with pytest.raises(ColdPoolError, match="cannot keep"):
        DriveMeasuring(tmp_path / "gone").rates()


def test_tables_are_kept_by_what_they_depend_on(tmp_path):
    kept = KeptWindows(tmp_path / "windows.json")
    key, other = (WindowKey.of(threads, DENSE_PASSES, SHAPE) for threads in (1, 2))
    table = SlackTable()
    table.observe(64, 100, 0.01)
    kept.keep(key, table)
    assert KeptWindows(kept.file).table(key).window(64, 100) == pytest.approx(0.01)
    assert kept.table(other) is None
    assert (kept.file.stat().st_mode & 0o777) == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 0}', '{"version": 1, "tables": 3}'])
def test_a_damaged_file_is_as_none(tmp_path, text):
    kept = KeptWindows(tmp_path / "windows.json")
    kept.file.write_text(text)
    key = WindowKey.of(1, DENSE_PASSES, SHAPE)
    assert kept.table(key) is None
    assert kept.drive(tmp_path) is None
    kept.keep(key, SlackTable())
    assert json.loads(kept.file.read_text())["version"] == 1


def test_a_damaged_entry_is_as_none(tmp_path):
    kept = KeptWindows(tmp_path / "windows.json")
    key = WindowKey.of(1, DENSE_PASSES, SHAPE)
    kept.keep(key, SlackTable())
    content = json.loads(kept.file.read_text())
    for record in content["tables"].values():
        record["seconds"] = [[1]]
    kept.file.write_text(json.dumps(content))
    assert kept.table(key) is None
