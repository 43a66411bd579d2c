# SPDX-License-Identifier: Apache-2.0
"""What is put in its place outlasts a power failure under its name, in the order that takes."""

import errno
import os

import pytest

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import keep_names, put_in_place
from hillinfer.secrecy.key_sources import KeyFile
from hillinfer.secrecy.library import SecrecyError


class ToldCalls(DriveCalls):
    """Tells which files and directories are synced, named and unnamed, one after the other."""

    def __init__(self, refusing=None):
        self.told, self.places, self.refusing = [], {}, refusing

    def open(self, path, flags, mode=0o600):
        descriptor = super().open(path, flags, mode)
        self.places[descriptor] = path
        if flags & os.O_CREAT:
            self.told.append(("make", path.name))
        return descriptor

    def fsync(self, descriptor):
        place = self.places[descriptor]
        self.told.append(("sync", place.name))
        if self.refusing is not None and place.is_dir():
            raise OSError(self.refusing, os.strerror(self.refusing))
        super().fsync(descriptor)

    def rename(self, source, target):
        super().rename(source, target)
        self.told.append(("name", target.name))

    def unlink(self, path):
        super().unlink(path)
        self.told.append(("unname", path.name))


def test_a_small_file_is_synced_before_it_has_its_name_and_its_name_behind(tmp_path):
    calls = ToldCalls()
    put_in_place(tmp_path / "store.json", b"{}", calls)
    assert (tmp_path / "store.json").read_bytes() == b"{}"
    assert calls.told == [
        ("make", "store.new"),
        ("sync", "store.new"),
        ("name", "store.json"),
        ("sync", tmp_path.name),
    ]


def test_a_name_that_the_drive_refuses_is_told(tmp_path):
    with pytest.raises(OSError, match="Input/output"):
        put_in_place(tmp_path / "store.json", b"{}", ToldCalls(errno.EIO))


@pytest.mark.parametrize("said", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_syncs_no_directories_is_none_that_fails(tmp_path, said):
    calls = ToldCalls(said)
    keep_names(tmp_path, calls)
    assert calls.told == [("sync", tmp_path.name)]


def test_a_key_is_there_after_a_power_failure_as_what_it_seals_is(tmp_path):
    calls = ToldCalls()
    KeyFile(tmp_path / "key").make(calls)
    assert calls.told == [("make", "key"), ("sync", "key"), ("sync", tmp_path.name)]


def test_a_key_that_may_be_gone_later_is_refused(tmp_path):
    with pytest.raises(SecrecyError, match="cannot be written"):
        KeyFile(tmp_path / "key").make(ToldCalls(errno.EIO))
    assert not (tmp_path / "key").exists()
