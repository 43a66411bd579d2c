# SPDX-License-Identifier: Apache-2.0
"""Too few descriptors are called so, nothing stays open, and with more of them the call works."""

import errno
import os
import re

import pytest
import torch
from few_descriptors import free_descriptors, open_files
from generation_runs import attached
from tiny_models import TinyModel, prompts

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import ColdFile, IOMode
from hillinfer.errors import ColdPoolError, SessionError
from hillinfer.sessions.opening import SavedSession
from hillinfer.sessions.writing import SessionWriter

IDS, _ = prompts([300], seed=5)
CAUSE = "Too many open files"
FIX = r"raise the limit on open files, \d+ now, with ulimit -n \d+"


@torch.no_grad()
def read(hill, cache):
    hill.model(input_ids=IDS, past_key_values=cache, logits_to_keep=1)


@pytest.fixture(scope="module")
def hill(tmp_path_factory):
    with attached(TinyModel().build(), tmp_path_factory.mktemp("cold"), io="threads") as hill:
        # What is opened once and stays.
        cache = hill.new_cache()
        read(hill, cache)
        cache.close()
        yield hill


@pytest.fixture(scope="module")
def saved(hill, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "session"
    cache = hill.new_cache()
    read(hill, cache)
    cache.save_session(directory)
    cache.close()
    return directory


def opening(hill, saved, cache, tmp_path):
    hill.new_cache().close()


def resuming(hill, saved, cache, tmp_path):
    hill.load_session(saved).close()


def saving(hill, saved, cache, tmp_path):
    cache.save_session(tmp_path / "another")


def looking(hill, saved, cache, tmp_path):
    with SavedSession(saved) as session:
        session.verify()


def one_file(hill, saved, cache, tmp_path):
    ColdFile(tmp_path, IOMode.BUFFERED).close()


@pytest.mark.parametrize("use", [opening, resuming, saving, looking, one_file])
def test_too_few_descriptors(hill, saved, tmp_path, tmp_path_factory, use):
    refused = 0
    for count in range(100):
        before = open_files()
        cache = None
        if use is saving:
            cache = hill.new_cache()
            read(hill, cache)
        try:
            with free_descriptors(count):
                use(hill, saved, cache, tmp_path)
        except (ColdPoolError, SessionError) as error:
            refused += 1
            said = str(error)
            assert CAUSE in said
            assert re.search(FIX, said), said
            assert len(said.splitlines()) == 1
            for wrong in ("is refused", "read the document again", "check the drive", "damaged"):
                assert wrong not in said
            assert list(tmp_path.iterdir()) == []
            # The same call works with more of them.
            if count == 0:
                use(hill, saved, cache, tmp_path_factory.mktemp("more"))
        else:
            break
        finally:
            if cache is not None:
                cache.close()
            assert open_files() == before
    assert 1 <= refused <= 60


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENFILE, "the machine has too many open files"),
        (errno.ENOMEM, "out of memory"),
        (errno.EACCES, "take the right to use it"),
        (errno.EROFS, "mounted read-only"),
        (errno.EIO, "check the drive"),
        (errno.ENOSPC, "free space on the drive"),
    ],
)
def test_every_cause_has_words_of_its_own(hill, saved, tmp_path, number, said):
    class Refusing(DriveCalls):
        def open(self, path, flags, mode=0o600):
            raise OSError(number, os.strerror(number))

    with pytest.raises(ColdPoolError, match=f"{os.strerror(number)}; .*{said}"):
        ColdFile(tmp_path, IOMode.BUFFERED, calls=Refusing())
    with pytest.raises(SessionError, match=f"{os.strerror(number)}; .*{said}") as refused:
        SavedSession(saved, Refusing())
    assert ("is refused" in str(refused.value)) is (number not in (errno.ENFILE, errno.ENOMEM))
    with pytest.raises(SessionError, match=f"{os.strerror(number)}; .*{said}"):
        SessionWriter(tmp_path / "session", Refusing())
