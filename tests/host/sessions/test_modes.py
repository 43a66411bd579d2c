# SPDX-License-Identifier: Apache-2.0
"""What a session and a cold pool leave on a drive is their owner's alone, whatever the mask."""

import os
import stat
from pathlib import Path

import pytest
from session_runs import IDS, feed

MASKS = (0o000, 0o002, 0o022, 0o077, 0o277)


def mode_of(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(params=MASKS, ids=oct)
def _mask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_mask")
@pytest.mark.parametrize("place", ["linked", "copied"])
def test_files_and_folders_are_the_owners_alone(attachment, tmp_path, place):
    """Parents that are made on the way, too."""
    target = tmp_path / "new" / "newer" / "session"
    cache = attachment.new_cache()
    feed(attachment.model, cache, IDS[:, :300])
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and str(attachment.settings.cold_dir) in str(link.readlink()):
            assert stat.S_IMODE(link.stat().st_mode) == 0o600
    if place == "copied":
        # Rows of another sequence lie in the same files, so they are written again.
        fork = cache.fork()
        feed(attachment.model, fork, IDS[:, 300:500])
    cache.save_session(target)
    for folder in (target, target.parent, target.parent.parent):
        assert mode_of(folder) == 0o700
    files = list(target.iterdir())
    assert len(files) == 10
    assert {mode_of(file) for file in files} == {0o600}
    attachment.load_session(target).close()
    if place == "copied":
        fork.close()
    cache.close()
