# SPDX-License-Identifier: Apache-2.0
"""Statistics of values in sessions: with them the bits of an unbroken run, without them others.

And how often codes were wanted: kept, and nothing but time depends on it.
"""

import errno
import os
import threading

import numpy as np
import pytest
import torch
from generation_runs import attached, attached_with
from session_runs import QUESTION, TINY, answer, content_of, feed, seal, seal_checksums
from single_reads import SingleReads
from tiny_models import prompts

from hillinfer.errors import SessionError
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
    content = content_of(tmp_path / "session")
    del content["digests"]["values.bin"]
    seal(tmp_path / "session", content)
    (tmp_path / "session" / "values.bin").unlink()
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
    content = content_of(tmp_path / "session")
    del content["digests"]["wanted.bin"]
    seal(tmp_path / "session", content)
    (tmp_path / "session" / "wanted.bin").unlink()
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


def test_a_session_gets_codes_in_the_file_where_dram_has_no_room_for_all(long_session, cold_dir):
    found, small = told(long_session, cold_dir, "2.5MiB")
    assert 0 < small.coded_reads <= small.coded_arrivals
    # Where all codes fit each is made once, when it is wanted, and none is read of the file.
    roomy, large = told(long_session, cold_dir, "8MiB")
    assert large.coded_reads == 0
    assert torch.equal(found, roomy)


def test_rows_that_cannot_be_read_for_codes_cost_no_answer(long_session, cold_dir):
    """A session whose codes nobody makes has the same bits, and reads rows."""
    expected, small = told(long_session, cold_dir, "2.5MiB")
    drive = GroupsLost()
    found, without = told(long_session, cold_dir, "2.5MiB", drive)
    assert torch.equal(found, expected)
    assert drive.failed > 0
    assert without.coded_reads < small.coded_reads / 2
