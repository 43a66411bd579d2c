# SPDX-License-Identifier: Apache-2.0
"""Scratch with a name: held while its owner lives, swept when it is dead, and nothing else is."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import ScratchPath, sweep

OURS = ".hillinfer-0123456789abcdef01234567.scratch"


@pytest.fixture(params=["file", "directory"])
def make(request):
    return {"file": ScratchPath.make_file, "directory": ScratchPath.make_directory}[request.param]


def filled(scratch):
    if scratch.path.is_dir():
        (scratch.path / "inner").mkdir()
        (scratch.path / "inner" / "rows").write_bytes(b"1")
    return scratch


def test_it_is_the_owners_only_and_goes_when_removed(make, tmp_path):
    scratch = filled(make(tmp_path, DriveCalls()))
    assert list(tmp_path.iterdir()) == [scratch.path]
    assert scratch.path.stat().st_mode & 0o077 == 0
    assert not os.get_inheritable(scratch.descriptor)
    scratch.remove()
    scratch.remove()
    assert list(tmp_path.iterdir()) == []


def test_it_is_held_while_it_lives_and_swept_afterwards(make, tmp_path):
    scratch = filled(make(tmp_path, DriveCalls()))
    assert sweep(tmp_path) == []
    assert scratch.path.exists()
    # Closing the descriptor is what the end of a process does.
    scratch.release()
    assert sweep(tmp_path) == [scratch.path]
    assert list(tmp_path.iterdir()) == []
    assert sweep(tmp_path) == []


def test_renamed_it_stays(make, tmp_path):
    scratch = filled(make(tmp_path, DriveCalls()))
    scratch.path.rename(tmp_path / "kept")
    scratch.remove()
    assert sweep(tmp_path) == []
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_a_killed_process_leaves_what_the_next_sweep_takes_and_a_living_one_keeps_its_own(tmp_path):
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from hillinfer.drive.calls import DriveCalls
        from hillinfer.drive.files import ScratchPath
        held = [make(Path(sys.argv[1]), DriveCalls())
                for make in (ScratchPath.make_file, ScratchPath.make_directory)]
        print(*(one.path for one in held), flush=True)
        time.sleep(60)
        """
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    with processes[0], processes[1]:
        dead, living = (set(process.stdout.readline().split()) for process in processes)
        processes[0].kill()
        assert processes[0].wait() == -signal.SIGKILL
        assert {str(path) for path in sweep(tmp_path)} == dead
        assert {str(path) for path in tmp_path.iterdir()} == living
        processes[1].kill()
        processes[1].wait()
    assert {str(path) for path in sweep(tmp_path)} == living


@pytest.mark.parametrize(
    "name",
    [
        "rows",
        ".hillinfer-",
        ".hillinfer-0123.scratch",
        OURS + ".old",
        "x" + OURS,
        OURS.upper(),
        OURS.replace(".hill", "hill"),
    ],
)
def test_other_names_stay(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    assert sweep(tmp_path) == []
    assert (tmp_path / name).exists()
    # The twin: the very same file under our name goes.
    (tmp_path / name).rename(tmp_path / OURS)
    assert sweep(tmp_path) == [tmp_path / OURS]


def test_symbolic_links_are_not_followed_and_stay(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_bytes(b"1")
    (tmp_path / OURS).symlink_to(target)
    assert sweep(tmp_path) == []
    assert (tmp_path / OURS).is_symlink()
    assert (target / "precious").exists()


def test_links_inside_a_swept_directory_are_not_followed(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").write_bytes(b"1")
    (tmp_path / OURS).mkdir()
    (tmp_path / OURS / "link").symlink_to(tmp_path / "target")
    assert sweep(tmp_path) == [tmp_path / OURS]
    assert (tmp_path / "target" / "precious").exists()


def test_pipes_and_sockets_neither_block_nor_go(tmp_path):
    os.mkfifo(tmp_path / OURS)
    assert sweep(tmp_path) == []
    assert stat.S_ISFIFO((tmp_path / OURS).stat().st_mode)


def test_what_another_user_owns_stays(tmp_path):
    (tmp_path / OURS).write_bytes(b"1")
    assert sweep(tmp_path, user=os.geteuid() + 1) == []
    assert sweep(tmp_path) == [tmp_path / OURS]


def test_a_directory_that_cannot_be_listed_is_no_error(tmp_path):
    assert sweep(tmp_path / "missing") == []


class WithoutLocks(DriveCalls):
    def lock(self, descriptor):
        raise OSError(errno.ENOLCK, "not here")


def test_where_there_are_no_locks_nothing_is_swept(make, tmp_path):
    scratch = make(tmp_path, WithoutLocks())
    scratch.release()
    assert sweep(tmp_path, WithoutLocks()) == []
    assert scratch.path.exists()


def test_what_takes_the_name_while_the_lock_is_taken_stays(tmp_path):
    """Between opening and locking, the leftover may go and something else may come."""
    (tmp_path / OURS).write_bytes(b"leftover")

    class Swapped(DriveCalls):
        def lock(self, descriptor):
            (tmp_path / OURS).unlink()
            (tmp_path / OURS).write_bytes(b"another's")
            super().lock(descriptor)

    assert sweep(tmp_path, Swapped()) == []
    assert (tmp_path / OURS).read_bytes() == b"another's"


def test_a_sweep_between_making_and_locking_costs_a_name_only(make, tmp_path):
    class SweptOnce(DriveCalls):
        def __init__(self):
            self.swept = []

        def lock(self, descriptor):
            if not self.swept:
                self.swept += sweep(tmp_path)
            super().lock(descriptor)

    calls = SweptOnce()
    scratch = make(tmp_path, calls)
    assert len(calls.swept) == 1
    assert scratch.path not in calls.swept
    assert list(tmp_path.iterdir()) == [scratch.path]
    assert sweep(tmp_path) == []
    scratch.remove()


def test_a_sweep_that_holds_the_lock_costs_a_name_only(make, tmp_path):
    class HeldOnce(DriveCalls):
        def __init__(self):
            self.holder = None

        def lock(self, descriptor):
            if self.holder is None:
                (path,) = tmp_path.iterdir()
                self.holder = os.open(path, os.O_RDONLY)
                fcntl.flock(self.holder, fcntl.LOCK_EX)
            super().lock(descriptor)

    calls = HeldOnce()
    scratch = make(tmp_path, calls)
    os.close(calls.holder)
    swept = sweep(tmp_path)
    assert len(swept) == 1
    assert scratch.path not in swept
    assert scratch.path.exists()
    scratch.remove()


def test_an_error_while_making_leaves_nothing(make, tmp_path):
    class FailsLate(DriveCalls):
        def open(self, path, flags, mode=0o600):
            if flags & os.O_DIRECTORY:
                raise OSError(errno.EIO, "broken")
            return super().open(path, flags, mode)

        def lock(self, descriptor):
            raise KeyboardInterrupt

    with pytest.raises((OSError, KeyboardInterrupt)):
        make(tmp_path, FailsLate())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        make(tmp_path / "missing", DriveCalls())


def make_and_sweep(tmp_path, calls):
    """Make scratch names and sweep at once; nothing that is held may go.

    Threads stand for processes: a lock belongs to an open file, not to a process.
    """
    end = time.monotonic() + 60
    lost, made, swept = [], [], []

    def goes_on():
        """Until it was tried often enough, however long a busy machine takes for it."""
        return not lost and (len(made) < 400 or not swept) and time.monotonic() < end

    def maker(make):
        while goes_on():
            scratch = make(tmp_path, calls)
            made.append(scratch.path)
            if not scratch.path.exists():
                lost.append(scratch.path)
            time.sleep(0.0005)
            if not scratch.path.exists():
                lost.append(scratch.path)
            scratch.release()

    def sweeper():
        while goes_on():
            swept.extend(sweep(tmp_path))

    threads = [
        threading.Thread(target=target, args=arguments)
        for target, arguments in [
            (maker, (ScratchPath.make_file,)),
            (maker, (ScratchPath.make_directory,)),
            (sweeper, ()),
            (sweeper, ()),
        ]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sweep(tmp_path)
    assert len(made) >= 400 or lost
    assert swept
    assert lost == []
    assert list(tmp_path.iterdir()) == []


def test_makers_and_sweepers_at_once_never_lose_what_is_held(tmp_path):
    make_and_sweep(tmp_path, DriveCalls())


class NoLocks(DriveCalls):
    """A drive whose locks hold nothing."""

    def lock(self, descriptor):
        pass


def test_without_the_lock_the_same_run_loses_some(tmp_path):
    """The twin of the test above: it can see a sweep that does not ask who lives."""

    def several():
        # On a busy machine sweepers may meet nobody's name in a whole run.
        for _ in range(5):
            make_and_sweep(tmp_path, NoLocks())

    with pytest.raises(AssertionError):
        several()
