# SPDX-License-Identifier: Apache-2.0
"""What lies behind a directory."""

import os
from pathlib import Path

import pytest

from hillinfer.drive.directories import DriveFacts, filesystem_of
from hillinfer.drive.files import IOMode
from hillinfer.errors import ColdPoolError

MOUNTS = r"""21 1 8:1 / / rw - ext4 /dev/a rw
22 21 0:5 / /dev/shm rw shared:2 - tmpfs tmpfs rw
23 21 8:2 / /data rw - xfs /dev/b rw
24 21 8:3 / /data rw - btrfs /dev/c rw
25 21 0:9 / /data/with\040space rw - nfs4 host:/x rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/x", "ext4"),
        ("/dev/shm/deep/down", "tmpfs"),
        ("/database", "ext4"),
        ("/data", "btrfs"),
        ("/data/with space/x", "nfs4"),
    ],
)
def test_filesystem_is_that_of_the_nearest_and_newest_mount(tmp_path, path, kind):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert filesystem_of(Path(path), mounts) == kind


def test_filesystem_unknown_where_mounts_are_not_told(tmp_path):
    assert filesystem_of(tmp_path, tmp_path / "none") == "unknown"


def test_probe_of_this_drive(cold_dir):
    facts = DriveFacts.probe(cold_dir)
    assert facts.io_mode in IOMode
    room = os.statvfs(cold_dir)
    assert abs(facts.free_bytes - room.f_bavail * room.f_frsize) < 1 << 30
    assert facts.filesystem == filesystem_of(cold_dir) != "unknown"
    assert list(cold_dir.iterdir()) == []


def test_memory_is_no_drive():
    shared = Path("/dev/shm")
    if filesystem_of(shared) != "tmpfs" or not os.access(shared, os.W_OK):
        pytest.skip("no tmpfs at /dev/shm: mount -t tmpfs tmpfs /dev/shm")
    warning = DriveFacts.probe(shared).warning
    assert "memory and not a drive" in warning
    assert "--cold-dir" in warning


@pytest.mark.parametrize(
    ("filesystem", "io_mode", "said"),
    [
        ("ext4", IOMode.DIRECT, None),
        ("ramfs", IOMode.BUFFERED, "memory and not a drive"),
        ("nfs4", IOMode.DIRECT, "a network"),
        ("overlay", IOMode.BUFFERED, "does not allow direct I/O"),
    ],
)
def test_warnings(tmp_path, filesystem, io_mode, said):
    warning = DriveFacts(tmp_path, filesystem, 1, io_mode).warning
    assert warning is None if said is None else said in warning


def test_directory_that_takes_no_file():
    with pytest.raises(ColdPoolError, match="cannot keep the cold pool in /proc"):
        DriveFacts.probe(Path("/proc"))
