# SPDX-License-Identifier: Apache-2.0
"""Statistics of values in sessions: with them the bits of an unbroken run, without them others.

And how often codes were wanted, and the codes: kept, and nothing but time depends on them.
"""

import errno
import os
import shutil
import threading

import numpy as np
import pytest
import torch
from generation_runs import attached, attached_with
from session_runs import (
    QUESTION,
    TINY,
    answer,
    content_of,
    feed,
    flip_bit,
    seal,
    seal_checksums,
)
from single_reads import SingleReads
from tiny_models import prompts

from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import HillInferWarning, SessionError
from hillinfer.sessions.opening import SavedSession
from hillinfer_model.kernel_spec import GROUP_TOKENS

CODED = {"exact": 0.02, "exact_floor": 10}
IDS, _ = prompts([1300], seed=5)
# The open segment is scored while it holds few of its tokens, and keeps statistics of those.
BEGUN = torch.cat([IDS[:, :1260], QUESTION[:, :4]], dim=1)
WHOLE = torch.cat([BEGUN, IDS[:, -30:], QUESTION], dim=1)


@pytest.fixture
def coded(tmp_path_factory):
    with attached(TINY.build(), tmp_path_factory.mktemp("cold"), **CODED) as hill:
        yield hill


def leave_out(directory, *names):
    """Make a session one of those that were saved before there was such a file."""
    content = content_of(directory)
    for name in names:
        del content["digests"][name]
        (directory / name).unlink()
    seal(directory, content)


def begun(hill):
    cache = hill.new_cache()
    feed(hill.model, cache, BEGUN[:, :1260])
    feed(hill.model, cache, BEGUN[:, 1260:], chunk=1)
    return cache


def test_a_session_goes_on_with_the_statistics_of_its_values(coded, tmp_path):
    cache = begun(coded)
    cache.save_session(tmp_path / "session")
    assert "values.bin" in content_of(tmp_path / "session")["digests"]
    expected = answer(coded.model, cache, WHOLE)
    assert torch.equal(
        answer(coded.model, coded.load_session(tmp_path / "session"), WHOLE), expected
    )
    assert cache.statistics().coded_tokens > 0
    own = content_of(tmp_path / "session")["fingerprint"]
    channels = own["kv_heads"] * own["head_dim"]
    # One byte of c for each channel, then four of M.
    taken = np.fromfile(tmp_path / "session" / "values.bin", np.uint8).reshape(-1, 5 * channels)
    taken[:, channels + 1 :: 4] ^= 1
    taken.tofile(tmp_path / "session" / "values.bin")
    with pytest.raises(SessionError, match=r"values\.bin was changed"):
        coded.load_session(tmp_path / "session")
    seal_checksums(tmp_path / "session")
    changed = answer(coded.model, coded.load_session(tmp_path / "session"), WHOLE)
    assert not torch.equal(changed, expected)


def test_sessions_that_know_no_coded_tokens_open(coded, cold_dir, tmp_path):
    """Statistics are taken of their rows then, the same ones each time."""
    cache = begun(coded)
    cache.save_session(tmp_path / "session")
    leave_out(tmp_path / "session", "values.bin", "codes.bin")
    twice = [answer(coded.model, coded.load_session(tmp_path / "session"), WHOLE) for _ in range(2)]
    assert torch.equal(*twice)


def test_what_coded_tokens_saved_opens_where_none_are_coded(coded, cold_dir, tmp_path):
    cache = begun(coded)
    cache.save_session(tmp_path / "session")
    cache.close()
    with attached(TINY.build(), cold_dir) as plain:
        once = answer(plain.model, plain.load_session(tmp_path / "session"), WHOLE)
        plain.load_session(tmp_path / "session").save_session(tmp_path / "again")
        assert "values.bin" not in content_of(tmp_path / "again")["digests"]
        assert torch.equal(answer(plain.model, plain.load_session(tmp_path / "again"), WHOLE), once)


def wanted_in(directory):
    layers = content_of(directory)["fingerprint"]["layers"]
    return np.fromfile(directory / "wanted.bin", np.float16).reshape(layers, -1)


def test_how_often_codes_were_wanted_goes_on(coded, tmp_path):
    cache = begun(coded)
    answer(coded.model, cache, WHOLE)
    cache.save_session(tmp_path / "session")
    wanted = wanted_in(tmp_path / "session")
    assert wanted.any(axis=1).all()
    # The open group has rows in the tail, and no codes.
    assert not wanted[:, wanted.shape[1] // 64 * 64 :].any()
    coded.load_session(tmp_path / "session").save_session(tmp_path / "again")
    assert np.array_equal(wanted_in(tmp_path / "again"), wanted)


def test_what_codes_are_worth_changes_no_bit(coded, tmp_path):
    cache = begun(coded)
    cache.save_session(tmp_path / "session")
    expected = answer(coded.model, cache, WHOLE)
    wanted = wanted_in(tmp_path / "session")
    turned = np.where(wanted > 0, 0, np.float16(100))
    turned.tofile(tmp_path / "session" / "wanted.bin")
    with pytest.raises(SessionError, match=r"wanted\.bin was changed"):
        coded.load_session(tmp_path / "session")
    seal_checksums(tmp_path / "session")
    loaded = coded.load_session(tmp_path / "session")
    loaded.save_session(tmp_path / "again")
    settled = wanted.shape[1] // 64 * 64
    assert np.array_equal(wanted_in(tmp_path / "again")[:, :settled], turned[:, :settled])
    assert torch.equal(answer(coded.model, loaded, WHOLE), expected)


@pytest.mark.parametrize("worth", [-1, np.nan, np.inf])
def test_what_no_token_is_worth_is_refused(coded, tmp_path, worth):
    begun(coded).save_session(tmp_path / "session")
    wanted = wanted_in(tmp_path / "session")
    wanted[-1, 70] = worth
    wanted.tofile(tmp_path / "session" / "wanted.bin")
    seal_checksums(tmp_path / "session")
    with pytest.raises(SessionError, match=r"wanted\.bin holds what no token is worth"):
        coded.load_session(tmp_path / "session")


def test_sessions_that_do_not_say_what_was_wanted_open_and_are_extended(coded, tmp_path):
    cache = begun(coded)
    cache.save_session(tmp_path / "session")
    expected = answer(coded.model, cache, WHOLE)
    leave_out(tmp_path / "session", "wanted.bin")
    loaded = coded.load_session(tmp_path / "session")
    assert torch.equal(answer(coded.model, loaded, WHOLE), expected)
    loaded.save_session(tmp_path / "again")
    assert wanted_in(tmp_path / "again").any()


LONG, _ = prompts([2400], seed=5)


@pytest.fixture(scope="module")
def long_session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    with attached(TINY.build(), folder, alpha=0.5, **CODED) as hill, hill.new_cache() as cache:
        feed(hill.model, cache, LONG)
        cache.save_session(folder / "session")
    return folder / "session"


@pytest.fixture
def older_session(long_session, tmp_path):
    """The same as it was saved before sessions had codes."""
    shutil.copytree(long_session, tmp_path / "older")
    leave_out(tmp_path / "older", "codes.bin")
    return tmp_path / "older"


def told(session, cold_dir, budget, calls=None):
    """Return what a session answers in a budget, and what it counted meanwhile."""
    made = {"dram_budget": budget, "alpha": 0.5, **CODED}
    with (
        attached_with(TINY.build(), cold_dir, {"calls": calls}, **made) as hill,
        hill.load_session(session) as cache,
    ):
        asked = torch.cat([LONG, QUESTION], dim=1)
        return answer(hill.model, cache, asked), cache.statistics()


class GroupsLost(SingleReads):
    """A drive that fails whoever reads all rows of a group; a step wants few of them."""

    def __init__(self):
        self.failed, self._fails = 0, threading.local()

    def land(self, way, landing):
        self._fails.is_sought = landing.count == GROUP_TOKENS
        return super().land(way, landing)

    def read_done(self, descriptor, into, offset, result):
        if not getattr(self._fails, "is_sought", False):
            return super().read_done(descriptor, into, offset, result)
        self.failed += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def preadv(self, descriptor, into, offset):
        # What failed is read once more, by itself.
        if getattr(self._fails, "is_sought", False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(descriptor, into, offset)


SMALL = "2.3MiB"


def test_an_older_session_gets_codes_in_the_file_where_dram_has_no_room_for_all(
    older_session, cold_dir
):
    found, small = told(older_session, cold_dir, SMALL)
    assert 0 < small.coded_reads < small.coded_arrivals
    # Where all codes fit each is made once, when it is wanted, and none is read of the file.
    roomy, large = told(older_session, cold_dir, "8MiB")
    assert large.coded_reads == 0
    assert torch.equal(found, roomy)


def test_rows_that_cannot_be_read_for_codes_cost_no_answer(older_session, cold_dir):
    """A session whose codes nobody makes has the same bits, and reads rows."""
    expected, small = told(older_session, cold_dir, SMALL)
    drive = GroupsLost()
    found, without = told(older_session, cold_dir, SMALL, drive)
    assert torch.equal(found, expected)
    assert drive.failed > 0
    assert without.coded_reads < small.coded_reads / 2


# --- codes in the session ---


def codes_in(directory):
    layers = content_of(directory)["fingerprint"]["layers"]
    return np.fromfile(directory / "codes.bin", np.uint8).reshape(layers, -1)


def test_a_session_brings_its_codes(long_session, older_session, cold_dir):
    """From the first step on, no row is read for a token whose codes were saved."""
    expected, older = told(older_session, cold_dir, SMALL)
    found, small = told(long_session, cold_dir, SMALL)
    assert torch.equal(found, expected)
    # What follows the document is another matter: its open group has no codes.
    assert small.coded_reads > older.coded_reads
    assert small.cold_read_bytes < older.cold_read_bytes
    assert small.code_write_bytes > 0
    # Where all fit they are in DRAM at once.
    (roomy, large), (_, older) = (
        told(one, cold_dir, "8MiB") for one in (long_session, older_session)
    )
    assert torch.equal(roomy, expected)
    assert large.coded_reads == 0
    assert large.coded_arrivals < older.coded_arrivals


def test_codes_of_a_session_are_what_is_attended_to(long_session, tmp_path, cold_dir):
    """The twin of all that says that bits are the same: with other codes they are not."""
    expected, _ = told(long_session, cold_dir, SMALL)
    shutil.copytree(long_session, tmp_path / "other")
    changed = codes_in(tmp_path / "other") ^ np.uint8(0x11)
    changed.tofile(tmp_path / "other" / "codes.bin")
    seal_checksums(tmp_path / "other")
    for budget in (SMALL, "8MiB"):
        assert not torch.equal(told(tmp_path / "other", cold_dir, budget)[0], expected)


def flipped(file):
    flip_bit(file, 70_001)


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def missing(file):
    file.unlink()


def a_link(file):
    file.rename(file.parent.parent / "elsewhere.bin")
    file.symlink_to(file.parent.parent / "elsewhere.bin")


@pytest.mark.parametrize("damage", [flipped, cut, missing, a_link])
def test_damaged_codes_cost_time_and_no_answer(long_session, tmp_path, cold_dir, damage):
    expected, whole = told(long_session, cold_dir, SMALL)
    shutil.copytree(long_session, tmp_path / "damaged")
    damage(tmp_path / "damaged" / "codes.bin")
    with pytest.warns(HillInferWarning, match=r"codes\.bin .* is not there as it was saved"):
        found, damaged = told(tmp_path / "damaged", cold_dir, SMALL)
    assert torch.equal(found, expected)
    assert damaged.cold_read_bytes > whole.cold_read_bytes


def test_codes_that_cannot_be_read_when_a_session_is_checked(long_session, cold_dir):
    expected, _ = told(long_session, cold_dir, SMALL)
    drive = OneFileLost((long_session / "codes.bin").stat().st_ino)
    with pytest.warns(HillInferWarning, match=r"codes\.bin .* is not there as it was saved"):
        found, _ = told(long_session, cold_dir, SMALL, drive)
    assert torch.equal(found, expected)


class OneFileLost(DriveCalls):
    """A drive that cannot read one file."""

    def __init__(self, inode):
        self._inode = inode

    def preadv(self, descriptor, into, offset):
        if os.fstat(descriptor).st_ino == self._inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(descriptor, into, offset)


def test_codes_that_change_behind_the_check(long_session, tmp_path, cold_dir):
    expected, _ = told(long_session, cold_dir, SMALL)
    shutil.copytree(long_session, tmp_path / "session")
    asked = torch.cat([LONG, QUESTION], dim=1)
    made = {"dram_budget": SMALL, "alpha": 0.5, **CODED}
    with (
        attached(TINY.build(), cold_dir, **made) as hill,
        SavedSession(tmp_path / "session") as saved,
    ):
        saved.verify()
        flip_bit(tmp_path / "session" / "codes.bin", 70_001)
        with pytest.warns(HillInferWarning, match=r"codes\.bin .* cannot be read any more"):
            cache = hill.resume(saved, saved.tokens)
        assert torch.equal(answer(hill.model, cache, asked), expected)
        cache.close()


def test_codes_without_statistics_are_no_session(long_session, tmp_path):
    shutil.copytree(long_session, tmp_path / "session")
    leave_out(tmp_path / "session", "values.bin")
    with pytest.raises(SessionError, match="codes of values have no statistics"):
        SavedSession(tmp_path / "session")


def test_codes_go_on_from_session_to_session(long_session, tmp_path, cold_dir):
    """Also where the rows lie in the session's files and behind them, and where all are copied."""
    codes = codes_in(long_session)
    assert codes.any(axis=1).all()
    made = {"dram_budget": "4MiB", "alpha": 0.5, **CODED}
    with attached(TINY.build(), cold_dir, **made) as hill:
        cache = hill.load_session(long_session)
        cache.save_session(tmp_path / "again")
        assert np.array_equal(codes_in(tmp_path / "again"), codes)
        feed(hill.model, cache, LONG[:, :700])
        cache.save_session(tmp_path / "extended")
        fork = cache.fork()
        # Those of the open segment are there once it has statistics.
        whole = codes.shape[1] // (len(LONG[0]) // GROUP_TOKENS) * 2048 // GROUP_TOKENS
        longer = codes_in(tmp_path / "extended")
        assert not codes[:, whole:].any()
        assert np.array_equal(longer[:, :whole], codes[:, :whole])
        assert longer[:, whole : codes.shape[1]].any(axis=1).all()
        asked = torch.cat([LONG, LONG[:, :700], QUESTION], dim=1)
        expected = answer(hill.model, cache, asked)
        assert torch.equal(answer(hill.model, fork, asked), expected)
        cache.close()
        fork.close()
    # Codes of the open segment of then are of its first statistics, which did not change.
    shutil.copytree(tmp_path / "extended", tmp_path / "older")
    leave_out(tmp_path / "older", "codes.bin")
    for place in ("extended", "older"):
        with (
            attached(TINY.build(), cold_dir, **made) as hill,
            hill.load_session(tmp_path / place) as cache,
        ):
            assert torch.equal(answer(hill.model, cache, asked), expected)


def test_caches_of_one_session_have_the_same_codes(long_session, cold_dir):
    """The second one writes none, and takes none from the first."""
    made = {"dram_budget": "2.7MiB", "alpha": 0.5, **CODED}
    asked = torch.cat([LONG, QUESTION], dim=1)
    with attached(TINY.build(), cold_dir, **made) as hill:
        first = hill.load_session(long_session)
        written = hill.statistics().code_write_bytes
        assert written > 0
        second = hill.load_session(long_session)
        assert hill.statistics().code_write_bytes == written
        expected = answer(hill.model, first, asked)
        assert torch.equal(answer(hill.model, second, asked), expected)
        assert second.statistics().coded_reads > 0
        first.close()
        written = hill.statistics().code_write_bytes
        third = hill.load_session(long_session)
        assert hill.statistics().code_write_bytes == written
        assert torch.equal(answer(hill.model, third, asked), expected)


def test_the_first_tokens_of_a_session_bring_their_codes(long_session, older_session, cold_dir):
    made = {"dram_budget": "2MiB", "alpha": 0.5, **CODED}
    asked = torch.cat([LONG[:, :1500], QUESTION], dim=1)
    found = []
    for place in (long_session, older_session):
        with attached(TINY.build(), cold_dir, **made) as hill, SavedSession(place) as saved:
            saved.verify()
            with hill.resume(saved, 1024) as cache:
                found.append((answer(hill.model, cache, asked), cache.statistics()))
    assert torch.equal(found[0][0], found[1][0])


def test_a_session_of_an_encrypted_pool_has_the_codes_of_a_plain_one(long_session, tmp_path):
    made = {"dram_budget": SMALL, "alpha": 0.5, **CODED, "encrypt_cold_pool": "yes"}
    (tmp_path / "cold").mkdir()
    expected, _ = told(long_session, tmp_path / "cold", SMALL)
    with attached(TINY.build(), tmp_path / "cold", **made) as hill:
        with hill.new_cache() as cache:
            feed(hill.model, cache, LONG)
            cache.save_session(tmp_path / "session")
        assert np.array_equal(codes_in(tmp_path / "session"), codes_in(long_session))
        with hill.load_session(tmp_path / "session") as cache:
            asked = torch.cat([LONG, QUESTION], dim=1)
            assert torch.equal(answer(hill.model, cache, asked), expected)
            # No codes lie beside encrypted rows.
            assert cache.statistics().code_write_bytes == 0
