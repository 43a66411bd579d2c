# SPDX-License-Identifier: Apache-2.0
"""Another document that starts the same is read on from whole segments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from session_runs import IDS, QUESTION, answer, feed
from tiny_models import prompts

from hillinfer.sessions.manifest import reusable_tokens
from hillinfer.sessions.opening import SavedSession

OTHER, _ = prompts([400], seed=31)


@pytest.mark.parametrize(
    ("common", "chunk", "reused"),
    [(2199, 512, 2048), (2047, 512, 1024), (1500, 100, 1000), (1500, 300, 900), (1500, 1500, 0)],
)
def test_what_is_read_on_equals_an_unbroken_run(attachment, saved, tmp_path, common, chunk, reused):
    ids = torch.cat([IDS[:, :common], OTHER], dim=1)
    if chunk != 512:
        read = attachment.new_cache()
        feed(attachment.model, read, IDS, chunk)
        read.save_session(tmp_path / "other chunks")
        saved = tmp_path / "other chunks"
    with SavedSession(saved) as session:
        session.verify()
        tokens = reusable_tokens(session.token_ids(), ids[0].tolist(), chunk, 1024)
        assert tokens == reused
        if not tokens:
            return
        cache = attachment.resume(session, tokens)
    assert cache.get_seq_length() == tokens
    feed(attachment.model, cache, ids[:, tokens:], chunk)
    unbroken = attachment.new_cache()
    feed(attachment.model, unbroken, ids, chunk)
    whole = torch.cat([ids, QUESTION], dim=1)
    assert torch.equal(
        answer(attachment.model, cache, whole), answer(attachment.model, unbroken, whole)
    )
    rows = cache.statistics().cold_write_bytes
    assert rows == (ids.shape[1] + 30 + 9) // 64 * 64 * 128 - tokens // 64 * 64 * 128


@pytest.mark.parametrize("left", [0, 1, 23])
def test_of_an_open_group_comes_what_is_wanted_of_it(attachment, saved, left):
    """It lies apart from the files of rows, which end before it."""
    tokens = IDS.shape[1] - left
    read = attachment.new_cache()
    feed(attachment.model, read, IDS)
    with SavedSession(saved) as session:
        session.verify()
        cache = attachment.resume(session, tokens)
    assert cache.get_seq_length() == tokens
    count = tokens % 64
    for own, theirs in zip(cache.sequences[0].tails, read.sequences[0].tails, strict=True):
        assert (own[:count] == theirs[:count]).all()
        assert (own[:count] != 0).any()
        assert not (own[:count] == theirs[1 : count + 1]).all()


@pytest.mark.parametrize("left", [24, 25, 60])
def test_a_group_that_is_cut_is_read_of_the_files_of_rows(attachment, saved, left):
    tokens = IDS.shape[1] - left
    read = attachment.new_cache()
    feed(attachment.model, read, IDS[:, :tokens])
    with SavedSession(saved) as session:
        session.verify()
        cache = attachment.resume(session, tokens)
    count = tokens % 64
    # A pass of another length rounds some of them in another way.
    for own, theirs in zip(cache.sequences[0].tails, read.sequences[0].tails, strict=True):
        assert (own[:count] == theirs[:count]).sum() >= 0.8 * own[:count].size


def test_the_wrong_prefix_would_be_seen(attachment, saved):
    ids = torch.cat([IDS[:, :1024], OTHER], dim=1)
    changed = ids.clone()
    changed[0, 100] = changed[0, 100] % 60 + 1
    unbroken = attachment.new_cache()
    feed(attachment.model, unbroken, changed)
    with SavedSession(saved) as session:
        session.verify()
        cache = attachment.resume(session, 1024)
    feed(attachment.model, cache, ids[:, 1024:])
    question = QUESTION
    assert not torch.equal(
        answer(attachment.model, cache, torch.cat([ids, question], dim=1)),
        answer(attachment.model, unbroken, torch.cat([changed, question], dim=1)),
    )


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2), max_size=60),
    start=st.integers(0, 60),
    rest=st.lists(st.integers(0, 2), max_size=60),
    chunk=st.integers(1, 20),
    segment=st.sampled_from([1, 4, 8]),
    unread=st.integers(0, 2),
)
def test_against_the_definition(ids, start, rest, chunk, segment, unread):
    other = ids[:start] + rest
    tokens = reusable_tokens(ids, other, chunk, segment, unread)
    if ids == other and not unread:
        assert tokens == len(ids)
        return

    longest = min(len(ids), max(0, len(other) - unread))
    common = max(n for n in range(longest + 1) if ids[:n] == other[:n])
    whole = max(n for n in range(0, common + 1, segment))
    assert tokens == max(n for n in range(0, whole + 1, chunk))
