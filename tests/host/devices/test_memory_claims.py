# SPDX-License-Identifier: Apache-2.0
"""Processes share a card's memory by what they claim of it."""

import json
import multiprocessing
import os
import shutil
import stat

import pytest

from hillinfer.devices.xrt.process import MemoryClaims
from hillinfer.errors import DeviceError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cards"


def test_claims_are_admitted_while_they_fit(folder):
    first, second = (
        MemoryClaims(folder, "0000:17:00.1", 100),
        MemoryClaims(folder, "0000:17:00.1", 100),
    )
    assert first.claim(60)
    assert not second.claim(60)
    assert second.claim(40)
    assert not first.claim(1)
    second.give_back(10)
    assert first.claim(10)
    first.release()
    first.release()
    assert second.claim(70)
    assert not second.claim(1)


def test_cards_do_not_share(folder):
    assert MemoryClaims(folder, "one", 100).claim(100)
    assert MemoryClaims(folder, "two", 100).claim(100)
    assert not MemoryClaims(folder, "one", 100).claim(1)


def _claim(folder, size, told, wait):
    claims = MemoryClaims(folder, "card", 100)
    told.put(claims.claim(size))
    wait.wait(60)


def test_a_process_that_ends_gives_its_memory_back(folder):
    context = multiprocessing.get_context("spawn")
    told, wait = context.Queue(), context.Event()
    other = context.Process(target=_claim, args=(folder, 80, told, wait))
    other.start()
    assert told.get(timeout=60)
    own = MemoryClaims(folder, "card", 100)
    assert not own.claim(50)
    # Without a chance to say so.
    other.kill()
    other.join()
    assert own.claim(100)


def test_a_number_that_came_again_is_another_process(folder):
    own = MemoryClaims(folder, "card", 100)
    assert own.claim(10)
    (path,) = folder.iterdir()
    claims = json.loads(path.read_text())
    path.write_text(json.dumps({f"{os.getpid()} 12345 abc": 90} | claims))
    assert own.claim(90)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 50}', '{"1 2 3": "many"}'])
def test_a_damaged_file_admits(folder, content):
    own = MemoryClaims(folder, "card", 100)
    assert own.claim(1)
    (path,) = folder.iterdir()
    path.write_text(content)
    assert own.claim(99)


def test_files_are_the_owners_and_links_are_not_followed(folder, tmp_path):
    own = MemoryClaims(folder, "../../card", 100)
    assert own.claim(1)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError, match="symbolic links"):
        own.claim(1)
    assert not (tmp_path / "elsewhere").exists()
    # There is nothing to be let go of, and nobody to tell.
    own.release()


def test_a_cache_that_is_cleared_meanwhile_is_made_again(folder):
    own = MemoryClaims(folder, "card", 100)
    assert own.claim(10)
    shutil.rmtree(folder)
    assert own.claim(60)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not MemoryClaims(folder, "card", 100).claim(50)
    shutil.rmtree(folder)
    own.release()
    assert MemoryClaims(folder, "card", 100).claim(100)
