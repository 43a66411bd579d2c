# SPDX-License-Identifier: Apache-2.0
"""A runtime that cannot be opened holds nothing of the drive."""

import csv
import errno
import os
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from copy_lanes import HostLane
from interrupts import interrupted
from runtime_rows import SETTINGS, SHAPE, fill, read

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import Pace
from hillinfer.drive.calls import DriveCalls
from hillinfer.engine.budget_plan import kernel_spec, staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.engine.selection import PrefetchPipeline
from hillinfer.errors import ColdPoolError, SettingsError
from hillinfer.scoring.native import NativeScorer


def opened(cold_dir, settings=SETTINGS, **options):
    return Runtime(SHAPE, settings, staging_bytes(SHAPE, SETTINGS) + (1 << 20), cold_dir, **options)


def descriptors():
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        # One of them is that of this very look.
        with suppress(FileNotFoundError):
            found.add((one.name, str(one.readlink())))
    return found


class NoMoreFiles(DriveCalls):
    """A drive that opens no more of its files once one layer has its own."""

    left = 2

    def open(self, path, flags, mode=0o600):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EIO, "no more room")
        return super().open(path, flags, mode)


def _raises(*_):
    raise ColdPoolError("no more room")


@contextmanager
def failing(part):
    """Let a part of the runtime fail; give what it is to be opened with."""
    if part == "the last part":
        with interrupted(PrefetchPipeline.__init__):
            yield {}
    elif part == "a file":
        yield {"calls": NoMoreFiles()}
    elif part == "what selects":
        yield {"evaluate": _raises}
    else:
        yield {"devices": {SETTINGS.device: _raises}}


def no_runtime():
    """Expect the error of a part, or the interrupt."""
    return pytest.raises((ColdPoolError, KeyboardInterrupt), match=r"no more room|^$")


@pytest.mark.parametrize("part", ["a file", "what selects", "the last part"])
def test_what_was_opened_before_an_error_is_closed(part, cold_dir):
    before = descriptors()
    with closing(opened(cold_dir)):
        # The twin: a runtime holds files.
        assert descriptors() > before
    assert descriptors() == before

    # Its traceback keeps all that was made: what is closed is closed, and not garbage.
    with failing(part) as options, no_runtime() as told:
        opened(cold_dir, **options)
    assert descriptors() == before
    assert told.tb is not None


@pytest.mark.parametrize("part", ["a device", "a file", "what selects", "the last part"])
def test_trace_and_timeline_are_closed_after_an_error(part, cold_dir, tmp_path):
    files = {"trace": tmp_path / "trace.json", "pool_timeline": tmp_path / "pools.csv"}
    settings = SETTINGS.changed(**files)

    def ours():
        return {place for _, place in descriptors()} & {str(file) for file in files.values()}

    with closing(opened(cold_dir, settings)):
        assert len(ours()) == 2
    assert not ours()
    # Its traceback keeps what was made.
    with failing(part) as options, no_runtime() as told:
        opened(cold_dir, settings, **options)
    assert not ours()
    assert told.tb is not None


def test_a_timeline_is_closed_where_the_trace_cannot_be_made(cold_dir, tmp_path):
    before = descriptors()
    (tmp_path / "gone").touch()
    settings = SETTINGS.changed(trace=tmp_path / "gone" / "t", pool_timeline=tmp_path / "p.csv")
    with pytest.raises(SettingsError) as told:
        opened(cold_dir, settings)
    assert descriptors() == before
    assert told.tb is not None


@pytest.mark.parametrize(("given", "closed"), [(False, 1), (True, 0)])
def test_a_device_that_was_made_here_is_closed_after_an_error(given, closed, cold_dir):
    shadows = CountingDevice()
    spec = kernel_spec(SHAPE, SETTINGS)
    scorer = DeviceScorer(NativeScorer(spec, SETTINGS.scope), shadows)
    made = {"scorer": scorer} if given else {"devices": {SETTINGS.device: lambda *_: scorer}}
    with pytest.raises(ColdPoolError, match="no more room"):
        opened(cold_dir, evaluate=_raises, **made)
    assert shadows.closed == closed


class CountingDevice:
    pace = Pace.EMULATED
    rows_together = 0
    closed = 0

    def close(self):
        self.closed += 1


def test_memory_is_unlocked_after_an_error_behind_the_gpu(cold_dir):
    lane = LockingLane()
    with failing("the last part"), no_runtime():
        opened(cold_dir, lane=lane)
    assert lane.locks == lane.unlocks == 1
    assert lane.ends == 1


class LockingLane(HostLane):
    """Counts what a GPU would lock."""

    locks = unlocks = ends = 0

    def page_lock(self, memory):
        self.locks += 1

    def page_unlock(self, memory):
        self.unlocks += 1

    def close(self):
        self.ends += 1
        super().close()


@pytest.mark.parametrize("observes", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_every_entry_is_told_to_who_observes_and_to_the_timeline(
    cold_dir, tmp_path, observes, writes
):
    file, seen = tmp_path / "pools.csv", []
    settings = SETTINGS.changed(pool_timeline=file) if writes else SETTINGS
    with closing(opened(cold_dir, settings, observe=seen.append if observes else None)) as runtime:
        sequence = runtime.open_sequence()
        fill(runtime, sequence, 150)
        for _ in range(2):
            read(runtime, 1, sequence, range(0, 150, 3))
    steps = [(1, 1), (2, 1)]
    assert [(one.step, one.layer) for one in seen] == (steps if observes else [])
    assert file.exists() == writes
    if writes:
        rows = list(csv.DictReader(file.open()))
        assert [(int(row["step"]), int(row["layer"])) for row in rows] == steps
