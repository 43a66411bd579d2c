# SPDX-License-Identifier: Apache-2.0
"""Odd places for a cold pool: one line that says why not, and the way out."""

import os
import socket
from pathlib import Path

import pytest
from tiny_models import TinyModel

import hillinfer
from hillinfer.drive.directories import filesystem_of
from hillinfer.errors import HillInferError, SetupWarning

BUDGET = "24MiB"


@pytest.fixture(scope="module")
def model():
    return TinyModel().build()


def a_file(folder):
    (folder / "file").write_text("")
    return folder / "file"


def a_pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def a_socket(folder):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(folder / "s"))
    return folder / "s"


def a_link_to_nowhere(folder):
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link"


def a_link_in_a_circle(folder):
    (folder / "link").symlink_to(folder / "link")
    return folder / "link"


def below_a_file(folder):
    return a_file(folder) / "below"


def closed(folder):
    if os.geteuid() == 0:
        pytest.skip("modes do not stop root: run the tests as another user")
    folder.chmod(0o500)
    return folder


PLACES = {
    "file": (a_file, "is no directory but a file"),
    "pipe": (a_pipe, "is no directory but a pipe"),
    "socket": (a_socket, "is no directory but a socket"),
    "device": (lambda _: Path("/dev/null"), "is no directory but a device"),
    "missing": (lambda folder: folder / "a" / "b", "does not exist .*mkdir -p"),
    "dangling": (a_link_to_nowhere, "it is a link to .*nowhere, where nothing is"),
    "circle": (a_link_in_a_circle, "cannot be looked at: Too many levels of symbolic links"),
    "below a file": (below_a_file, "cannot be looked at: Not a directory"),
    "zero": (lambda folder: folder / "a\0b", "cannot be looked at: embedded null byte"),
    "long": (lambda folder: folder / ("n" * 300), "cannot be looked at: File name too long"),
    "proc": (lambda _: Path("/proc"), "cannot keep the cold pool in /proc: it takes no files"),
    "own proc": (lambda _: Path("/proc/self/fd"), "cannot keep the cold pool in /proc/self/fd: .+"),
    "sys": (lambda _: Path("/sys"), "cannot keep the cold pool in /sys: .+"),
    "closed": (closed, "cannot keep the cold pool in .*: Permission denied"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_odd_place_is_refused_with_the_reason(model, tmp_path, place):
    make, said = PLACES[place]
    chosen = make(tmp_path)
    with (
        hillinfer.attach(model, cold_dir=chosen, dram_budget=BUDGET) as hill,
        pytest.raises(HillInferError, match=said) as refused,
    ):
        hill.new_cache()
    line = str(refused.value)
    assert len(line.splitlines()) == 1
    assert "None" not in line
    assert "--cold-dir" in line
    assert len(line) < 500


def test_memory_in_place_of_a_drive_is_told(model):
    shared = Path("/dev/shm")
    if filesystem_of(shared) != "tmpfs" or not os.access(shared, os.W_OK):
        pytest.skip("no tmpfs at /dev/shm: mount -t tmpfs tmpfs /dev/shm")
    with (
        hillinfer.attach(model, cold_dir=shared, dram_budget=BUDGET) as hill,
        pytest.warns(SetupWarning, match="/dev/shm is tmpfs, which is memory and not a drive"),
    ):
        hill.new_cache().close()
