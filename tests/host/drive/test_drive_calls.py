# SPDX-License-Identifier: Apache-2.0
"""The thin layer under storage does what the system does, and nothing under it is forgotten."""

import ast
import os
from pathlib import Path

import pytest

import hillinfer.drive
from hillinfer.drive.calls import DriveCalls

# Calls that reach a drive; storage makes them through DriveCalls only.
_RAW = frozenset(
    (
        *("open", "close", "read", "write", "pread", "preadv", "pwrite", "pwritev", "fsync"),
        *("fdatasync", "link", "rename", "replace", "unlink", "remove", "mkdir", "rmdir"),
        *("truncate", "ftruncate"),
    )
)


@pytest.fixture
def calls():
    return DriveCalls()


def test_a_file_from_nameless_to_gone(calls, tmp_path):
    nameless = calls.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    assert os.fstat(nameless).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(nameless)
    assert calls.pwrite(nameless, memoryview(b"abc"), 2) == 3
    calls.fsync(nameless)
    calls.fdatasync(nameless)
    assert calls.size(nameless) == 5
    calls.link(nameless, tmp_path / "named")
    with pytest.raises(FileExistsError):
        calls.link(nameless, tmp_path / "named")
    calls.rename(tmp_path / "named", tmp_path / "renamed")
    into = memoryview(bytearray(5))
    assert calls.preadv(nameless, into, 1) == 4
    assert into.tobytes() == b"\0abc\0"
    calls.unlink(tmp_path / "renamed")
    calls.close(nameless)
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.size(nameless)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_and_its_lock(calls, tmp_path):
    calls.mkdir(tmp_path / "d")
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    first, second = (calls.open(tmp_path / "d", os.O_RDONLY | os.O_DIRECTORY) for _ in range(2))
    calls.lock(first)
    with pytest.raises(BlockingIOError):
        calls.lock(second)
    calls.close(first)
    calls.lock(second)
    calls.close(second)
    calls.rmdir(tmp_path / "d")
    assert not (tmp_path / "d").exists()


def raw_calls(source):
    """Return the calls `os.NAME(...)` of a module that reach a drive."""
    return {
        node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "os"
        and node.func.attr in _RAW
    }


def test_storage_reaches_the_drive_through_it_only():
    assert raw_calls("import os\nos.pwrite(1, b'', 0)") == {"pwrite"}
    modules = sorted(Path(hillinfer.drive.__path__[0]).glob("*.py"))
    assert len(modules) > 8
    for module in modules:
        found = raw_calls(module.read_text(encoding="utf-8"))
        assert module.name == "calls.py" or not found, (module.name, found)
