# SPDX-License-Identifier: Apache-2.0
"""The cache directory is its owner's alone, whatever the umask and whatever was there."""

import os
import stat

import pytest

from hillinfer.errors import SettingsError
from hillinfer.system.files import user_cache_dir


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077, 0o777], ids=oct)
@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_every_folder_that_is_made_is_the_owners(mask, variable, umask, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "new" / "home"))
    umask(mask)
    folder = user_cache_dir("models", "one")
    made = [one for one in (folder, *folder.parents) if one.is_relative_to(tmp_path / "new")]
    assert len(made) == (5 if variable == "XDG_CACHE_HOME" else 6)
    assert {mode(one) for one in made} == {0o700}


def test_folders_of_ours_are_closed_and_others_left_as_they_are(umask, monkeypatch, tmp_path):
    umask(0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "hillinfer" / "models").mkdir(parents=True, mode=0o777)
    folder = user_cache_dir("models")
    assert (mode(folder), mode(folder.parent), mode(folder.parent.parent)) == (0o700, 0o700, 0o777)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
@pytest.mark.parametrize("whose", ["hillinfer", "hillinfer/models"])
def test_a_folder_of_another_user_is_refused(whose, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hillinfer" / "models").mkdir(parents=True)
    os.chown(tmp_path / whose, 12345, 12345)
    with pytest.raises(SettingsError, match="belongs to user 12345") as refused:
        user_cache_dir("models")
    assert str(tmp_path / whose) in str(refused.value)


def test_a_file_in_a_folders_place(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hillinfer").write_text("")
    with pytest.raises(SettingsError, match="set XDG_CACHE_HOME to one of yours"):
        user_cache_dir("models")
