# SPDX-License-Identifier: Apache-2.0
"""A prompt that was read in stages is read whole while nobody waits."""

import errno
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from test_bands import PLACEMENTS, Failing, attached, kept_of
from test_reading import ANSWER, IDS, SCHEDULE, TINY, TOKENS, generated, lengths
from tiny_models import FAMILIES, TinyModel, prompts
from transformers import DynamicCache

import hillinfer
from hillinfer.errors import CacheUseError, ColdPoolError, SessionError, UnsupportedFeatureError
from hillinfer.generate.stages import Completed
from hillinfer.hf.attach import Attachment
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store

QUESTION, _ = prompts([40], seed=31)
# Of answers that are read from rows that were made in other pieces.
CLOSE = {"atol": 2e-3, "rtol": 2e-3}
# Rotary positions that turn by how long the text is.
BY_LENGTH = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 256,
        "short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0],
    },
}  # fmt: skip


@pytest.fixture
def model():
    return TINY.build()


def asked(pruning, model, cache, question=QUESTION):
    """Ask about what a cache holds, and return the logits behind the question."""
    held = cache.get_seq_length()
    with pruning.prompt(held + question.shape[1], question.shape[1]), torch.no_grad():
        return model(question, past_key_values=cache, logits_to_keep=1).logits


def asked_plainly(model, cache):
    """Ask a fork without pruning, and return the logits behind the question."""
    with torch.no_grad():
        return model(QUESTION, past_key_values=cache.fork(), logits_to_keep=1).logits


def waits(pruning, model, cache, ids=IDS, chunk=350):
    """Read a document that waits at the cut for what is asked about it."""
    with pruning.prompt(ids.shape[1] + 1), torch.no_grad():
        for part in ids.split(chunk, 1):
            model(part, past_key_values=cache, logits_to_keep=1)


def stopping_after(pieces):
    asked = iter([False] * pieces)
    return lambda: next(asked, True)


@contextmanager
def read_whole(model, hill=None, ids=IDS):
    cache = hill.new_cache() if hill else DynamicCache(config=model.config)
    with torch.no_grad():
        for part in ids.split(350, 1):
            model(part, past_key_values=cache, logits_to_keep=1)
    yield cache


@pytest.mark.parametrize("kind", BY_LENGTH)
@torch.no_grad()
def test_pieces_turn_by_the_length_of_the_whole_document(kind):
    """Those alone would be turned as a shorter text is, behind layers that were not."""
    config = TINY.config()
    config.rope_parameters, config.max_position_embeddings = BY_LENGTH[kind], 256

    def fresh():
        # Of its own: what such positions turned by last is kept by the model.
        model = TINY.build()
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model

    def answer(chunk, schedule=None, pieces=1024):
        model, cache = fresh(), DynamicCache(config=config)
        if schedule is None:
            for part in IDS.split(chunk, 1):
                model(part, past_key_values=cache, logits_to_keep=1)
            return model(QUESTION, past_key_values=cache, logits_to_keep=1).logits
        with hillinfer.prune(model, schedule, chunk_tokens=pieces) as pruning:
            if schedule == SCHEDULE:
                return generated(model, IDS, cache)[1]
            waits(pruning, model, cache, chunk=chunk)
            pruning.complete(cache, piece_tokens=pieces)
            return asked(pruning, model, cache)

    whole = answer(TOKENS)
    torch.testing.assert_close(answer(TOKENS, "2:50%", pieces=130), whole, **CLOSE)
    torch.testing.assert_close(answer(TOKENS, SCHEDULE, 100), answer(TOKENS, SCHEDULE), **CLOSE)
    # The twin: a model that is given the document in such pieces answers something else.
    assert not torch.allclose(answer(130), whole, atol=0.1)


@pytest.mark.parametrize("attaches", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_that_was_completed_is_as_one_that_was_read_whole(family, attaches, cold_dir):
    model = TinyModel(family, "mha", layers=5).build()
    hill = attached(model, cold_dir, alpha=1.0) if attaches else None
    with torch.no_grad(), read_whole(model, hill) as whole:
        expected = model(QUESTION, past_key_values=whole, logits_to_keep=1).logits
    with hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning:
        cache = hill.new_cache() if hill else DynamicCache(config=model.config)
        waits(pruning, model, cache)
        assert pruning.complete(cache, piece_tokens=130) == Completed(TOKENS, TOKENS)
        assert lengths(cache) == [TOKENS] * 5
        found = asked(pruning, model, cache)
        assert pruning.read_of(cache) is None
        torch.testing.assert_close(found, expected, **CLOSE)
        # What is whole stays so.
        assert lengths(cache) == [TOKENS + 40] * 5
        assert pruning.complete(cache).is_whole
    # The same question where half is left out has another answer.
    with hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning:
        cache = hill.new_cache() if hill else DynamicCache(config=model.config)
        waits(pruning, model, cache)
        other = asked(pruning, model, cache)
    assert not torch.allclose(other, expected, **CLOSE)
    if hill:
        hill.detach()


def test_rows_of_an_ordinary_cache_are_those_of_a_whole_read(model):
    with read_whole(model) as whole, hillinfer.prune(model, SCHEDULE) as pruning:
        cache = DynamicCache(config=model.config)
        waits(pruning, model, cache)
        pruning.complete(cache)
    for own, other in zip(cache.layers, whole.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own.values, other.values, atol=1e-4, rtol=1e-4)


def farthest(one, other):
    """How far keys and values of two ordinary caches lie apart."""
    pairs = zip(one.layers, other.layers, strict=True)
    parts = [(a.keys - b.keys, a.values - b.values) for a, b in pairs]
    return max(float(part.abs().max()) for both in parts for part in both)


def test_rows_are_a_dense_prefill_s_and_so_a_store_may_take_them(model):
    """In pieces as long as chunks they have its bits, else those of another division of it."""
    with read_whole(model) as whole, hillinfer.prune(model, SCHEDULE) as pruning:
        for piece in (350, 200):
            cache = DynamicCache(config=model.config)
            waits(pruning, model, cache)
            pruning.complete(cache, piece_tokens=piece)
            assert (farthest(cache, whole) == 0) == (piece == 350)
    divided = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in IDS.split(200, 1):
            model(part, past_key_values=divided, logits_to_keep=1)
    # Both are rounding, which reuse="longest" allows and "exact" does not.
    assert 0 < farthest(cache, whole) <= farthest(divided, whole) < 1e-5


def test_a_cache_on_the_drive_has_these_bits_too(model, cold_dir):
    found = {}
    with attached(model, cold_dir, alpha=1.0) as hill, read_whole(model, hill) as whole:
        expected = asked_plainly(model, whole)
        with hillinfer.prune(model, SCHEDULE) as pruning:
            for piece in (350, 200):
                cache = hill.new_cache()
                waits(pruning, model, cache)
                pruning.complete(cache, piece_tokens=piece)
                found[piece] = asked_plainly(model, cache)
    assert torch.equal(found[350], expected)
    assert not torch.equal(found[200], expected)


# The answer ends the group that a question leaves open.
TURN, DECODED = torch.cat([IDS, QUESTION, QUESTION[:, :22]], 1), 9
PLACES = PLACEMENTS | {"sealed": {"encrypt_cold_pool": "yes"}}


def of_completed(model, cold_dir, **changes):
    """Answer over a document that was completed, with these settings."""
    with (
        attached(model, cold_dir, **changes) as hill,
        hillinfer.prune(model, SCHEDULE) as pruning,
    ):
        cache = hill.new_cache(expected_tokens=800)
        waits(pruning, model, cache)
        pruning.complete(cache)
        return generated(model, TURN, cache, None, DECODED)


@pytest.fixture(scope="module")
def completed_in_dram(cold_dir):
    model = TINY.build()
    expected = of_completed(model, cold_dir, **PLACES["in DRAM"])
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE):
        _, chosen = generated(model, TURN, hill.new_cache(), None, DECODED)
    # What was chosen has other bits.
    assert not torch.equal(chosen, expected[1])
    return expected


@pytest.mark.parametrize("name", PLACES)
def test_bits_of_a_completed_document_are_the_same_wherever_rows_lie(
    name, completed_in_dram, model, cold_dir
):
    tokens, logits = of_completed(model, cold_dir, **PLACES[name])
    assert tokens == completed_in_dram[0]
    assert torch.equal(logits, completed_in_dram[1])


@pytest.mark.parametrize("attaches", [False, True])
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_question_that_comes_earlier_is_answered_as_without(pieces, attaches, model, cold_dir):
    hill = attached(model, cold_dir) if attaches else None
    with hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning:
        answers = []
        for begun in (0, pieces):
            cache = hill.new_cache() if hill else DynamicCache(config=model.config)
            waits(pruning, model, cache)
            done = pruning.complete(cache, stopping_after(begun), piece_tokens=100)
            assert done == Completed(TOKENS, 100 * begun)
            answers.append((asked(pruning, model, cache), kept_of(pruning, cache)))
    assert torch.equal(answers[0][0], answers[1][0])
    assert answers[0][1] == answers[1][1]
    if hill:
        hill.detach()


@pytest.mark.parametrize("attaches", [False, True])
def test_it_goes_on_where_it_stopped_and_behind_what_comes(attaches, model, cold_dir):
    hill = attached(model, cold_dir, alpha=1.0) if attaches else None
    more = torch.cat([IDS, prompts([90], seed=33)[0]], 1)
    with read_whole(model, hill, more) as whole, torch.no_grad():
        expected = model(QUESTION, past_key_values=whole, logits_to_keep=1).logits
    with hillinfer.prune(model, SCHEDULE) as pruning:
        cache = hill.new_cache() if hill else DynamicCache(config=model.config)
        waits(pruning, model, cache)
        assert pruning.complete(cache, stopping_after(2), 200) == Completed(TOKENS, 400)
        # More of the document.
        with pruning.prompt(TOKENS + 91), torch.no_grad():
            model(more[:, TOKENS:], past_key_values=cache, logits_to_keep=1)
        assert lengths(cache) == [790, 790, 400, 400, 400]
        assert pruning.complete(cache, stopping_after(1), 200) == Completed(790, 600)
        assert pruning.complete(cache, piece_tokens=200).is_whole
        torch.testing.assert_close(asked(pruning, model, cache), expected, **CLOSE)
    if hill:
        hill.detach()


@pytest.mark.parametrize("attaches", [False, True])
def test_an_answer_is_completed_with_its_prompt(attaches, model, cold_dir):
    hill = attached(model, cold_dir, alpha=1.0) if attaches else None
    with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
        cache = hill.new_cache() if hill else DynamicCache(config=model.config)
        answer, _ = generated(model, IDS, cache)
        held = TOKENS + len(answer) - 1
        assert pruning.complete(cache) == Completed(held, held)
        found = asked(pruning, model, cache)
    ids = torch.cat([IDS, torch.tensor([answer[:-1]])], 1)
    with read_whole(model, hill, ids) as whole, torch.no_grad():
        expected = model(QUESTION, past_key_values=whole, logits_to_keep=1).logits
    torch.testing.assert_close(found, expected, **CLOSE)
    if hill:
        hill.detach()


def test_what_was_chosen_just_now_is_completed_too(model, cold_dir):
    """With later="keep" states are there until a pass behind the prompt shows that it counted."""
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE) as pruning:
        cache = hill.new_cache()
        with torch.no_grad():
            model(IDS, past_key_values=cache, logits_to_keep=1)
        assert lengths(cache)[4] < TOKENS
        assert pruning.complete(cache).is_whole
        assert lengths(cache) == [TOKENS] * 5
        other = hill.new_cache()
        generated(model, IDS, other)
        with pytest.raises(UnsupportedFeatureError, match="or read whole, because"):
            pruning.complete(other)


def test_forks_are_completed_by_themselves(model, cold_dir):
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE) as pruning:
        cache = hill.new_cache()
        waits(pruning, model, cache)
        pruning.complete(cache, stopping_after(2), 200)
        fork = cache.fork()
        pruning.complete(cache)
        assert lengths(fork) == [TOKENS, TOKENS, 400, 400, 400]
        assert pruning.complete(fork).is_whole
        twin = cache.fork()
        assert lengths(twin) == [TOKENS] * 5
        answers = [asked(pruning, model, one) for one in (cache, twin)]
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("attaches", "left"),
    [(False, 650), (False, 450), (True, 650), (True, 451), (True, 450), (True, 130)],
)
def test_what_is_cropped_before_it_is_whole_is_read_again(left, attaches, model, cold_dir):
    hill = attached(model, cold_dir) if attaches else None
    with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
        answers = []
        for pieces in (0, 3):
            cache = hill.new_cache() if hill else DynamicCache(config=model.config)
            waits(pruning, model, cache)
            pruning.complete(cache, stopping_after(pieces), 150)
            cache.crop(left - TOKENS)
            answers.append(asked(pruning, model, cache))
            assert pruning.complete(cache).is_whole
            answers[-1] = answers[-1], asked(pruning, model, cache)
    for own, other in zip(*answers, strict=True):
        torch.testing.assert_close(own, other, **CLOSE)
    if hill:
        hill.detach()


@pytest.mark.parametrize("attaches", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_breaks_off_leaves_a_document_that_waits(error, attaches, model, cold_dir):
    hill = attached(model, cold_dir) if attaches else None
    calls = iter(range(9))

    def breaks(*given):
        # In the second piece.
        if next(calls) == 1:
            raise error

    with hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning:
        answers = []
        for broken in (False, True):
            cache = hill.new_cache() if hill else DynamicCache(config=model.config)
            waits(pruning, model, cache)
            if broken:
                hook = model.model.layers[3].mlp.register_forward_pre_hook(breaks)
                with pytest.raises(error):
                    pruning.complete(cache, piece_tokens=200)
                hook.remove()
                assert lengths(cache) == [TOKENS, TOKENS, 0, 0, 0]
            fork = cache.fork() if hill else None
            answers.append(asked(pruning, model, cache))
            if fork:
                assert pruning.complete(fork).is_whole
    assert torch.equal(*answers)
    if hill:
        hill.detach()


def test_a_document_that_is_half_whole_is_not_answered_without_its_pruning(model, cold_dir):
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        with hillinfer.prune(model, SCHEDULE) as pruning:
            waits(pruning, model, cache)
            pruning.complete(cache, stopping_after(1), 200)
        with pytest.raises(CacheUseError, match="wait to be read by deeper layers"):
            generated(model, torch.cat([IDS, ANSWER], 1), cache)
        with hillinfer.prune(model, SCHEDULE) as pruning:
            assert pruning.complete(cache).is_whole
        # Whole, it needs none.
        found = generated(model, torch.cat([IDS, ANSWER], 1), cache)
        assert len(found[0]) > 1


def test_states_that_do_not_come_back_end_it_with_their_name(model, cold_dir):
    calls, settings = Failing(), hillinfer.Settings().changed(cold_dir=cold_dir, alpha=0.2)
    with Attachment(model, settings, calls) as hill, hillinfer.prune(model, SCHEDULE) as pruning:
        cache = hill.new_cache()
        waits(pruning, model, cache)
        calls.reading = errno.EIO
        with pytest.raises(ColdPoolError, match="of states that wait of the cold pool"):
            pruning.complete(cache)
        calls.reading = None
        assert lengths(cache) == [TOKENS, TOKENS, 0, 0, 0]
        assert pruning.complete(cache).is_whole


@pytest.mark.parametrize("later", ["keep", "anew"])
def test_a_completed_document_is_saved_as_any_other(later, model, cold_dir, tmp_path):
    """Its session is one of a whole read, for whoever knows nothing of pruning."""
    with attached(model, cold_dir) as hill:
        with hillinfer.prune(model, SCHEDULE, later=later) as pruning:
            cache = hill.new_cache()
            if later == "anew":
                # Layers before the cut have begun to code what they decoded.
                generated(model, IDS, cache)
            else:
                waits(pruning, model, cache)
            with pytest.raises(SessionError, match="complete it with the pruning"):
                cache.save_session(tmp_path / "half")
            pruning.complete(cache)
        cache.save_session(tmp_path / "whole")
        turn = torch.cat([torch.tensor(cache.token_ids), ANSWER], 1)
        answers = [generated(model, turn, cache, None, 12)]
    with attached(model, cold_dir) as hill:
        again = hill.load_session(tmp_path / "whole")
        assert lengths(again) == [turn.shape[1] - ANSWER.shape[1]] * 5
        answers.append(generated(model, turn, again, None, 12))
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])


def test_a_store_takes_a_prompt_once_it_is_read_whole(model, cold_dir, tmp_path):
    """Answers and rows of what was chosen are never stored; what is stored is not chosen from."""
    Store.create(tmp_path / "store", 64 << 20)
    with attached(model, cold_dir, store=tmp_path / "store") as hill:
        with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
            cache = hill.new_cache()
            answer, _ = generated(model, IDS, cache, 100)
            other = hill.new_cache()
            # Nothing was stored, so another cache chooses, too.
            assert generated(model, IDS, other, 100)[0] == answer
            assert other.read_from_store.found_tokens == 0
            assert lengths(other)[4] < TOKENS
            pruning.complete(cache)
            assert cache.read_from_store.stored_tokens == 640
            expected = asked(pruning, model, cache, ANSWER)
            found = hill.new_cache()
            turn = torch.cat([IDS, torch.tensor([answer[:-1]]), ANSWER], 1)
            _, own = generated(model, turn, found, None, 1)
            assert found.read_from_store.found_tokens == 640
            assert lengths(found) == [turn.shape[1]] * 5
            torch.testing.assert_close(own[0], expected[0], atol=0.03, rtol=0.03)
        # A cache that knows nothing of pruning finds it, too.
        plain = hill.new_cache()
        generated(model, turn, plain, None, 1)
        # The turn's own group was read densely behind it, and stored.
        assert plain.read_from_store.found_tokens == 704
    with attached(model, cold_dir, alpha=1.0) as hill, read_whole(model, hill) as whole:
        dense, _ = generated(model, torch.cat([IDS, QUESTION], 1), whole)
    with attached(model, cold_dir, alpha=1.0, store=tmp_path / "store") as hill:
        cache = hill.new_cache()
        stored, _ = generated(model, torch.cat([IDS, QUESTION], 1), cache)
        assert cache.read_from_store.found_tokens == 640
    assert stored == dense


def test_an_ordinary_cache_is_stored_once_it_is_whole(model, tmp_path):
    Store.create(tmp_path / "store", 64 << 20)
    ids = IDS[0].tolist()
    with Store(tmp_path / "store") as store:
        prompts_of_model = StoredPrompts(store, model)
        with hillinfer.prune(model, SCHEDULE) as pruning:
            # What stands around a model's layers makes no other model of it.
            assert StoredPrompts(store, model).namespace == prompts_of_model.namespace
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(IDS, past_key_values=cache, logits_to_keep=1)
            with pytest.raises(CacheUseError, match="once complete"):
                prompts_of_model.keep(cache, ids)
            pruning.complete(cache)
            assert prompts_of_model.keep(cache, ids) == 640
        loaded = DynamicCache(config=model.config)
        assert prompts_of_model.load_into(loaded, ids) == 640
        assert lengths(loaded) == [640] * 5


# --- processes that are killed ---

READER = """
import os, signal, sys
sys.path[:0] = sys.argv[2].split(":")
import torch
import hillinfer
from pathlib import Path
from test_bands import attached
from test_completion import waits
from test_reading import IDS, SCHEDULE, TINY, generated

def kills(*given):
    os.kill(os.getpid(), signal.SIGKILL)

model = TINY.build()
place, before = sys.argv[3:5]
with attached(model, Path(sys.argv[1])) as hill, hillinfer.prune(model, SCHEDULE) as pruning:
    cache = hill.new_cache()
    if before == "completion":
        waits(pruning, model, cache)
    model.get_submodule(place).register_forward_pre_hook(kills)
    if before == "completion":
        pruning.complete(cache)
    else:
        generated(model, IDS, cache, 200)
"""


@pytest.mark.parametrize(
    ("place", "before"),
    [
        # A chunk waits; either band has rows; the layers are behind it; and as it is completed.
        ("model.layers.1.mlp", "nothing"),
        ("model.layers.2.mlp", "nothing"),
        ("model.layers.4.mlp", "nothing"),
        ("lm_head", "nothing"),
        ("model.layers.3.mlp", "completion"),
    ],
)
def test_a_process_that_is_killed_leaves_nothing_on_the_drive(
    place, before, model, cold_dir, warm_python
):
    arguments = [str(cold_dir), ":".join(sys.path), place, before]
    ended = subprocess.run([*warm_python, "-c", READER, *arguments], check=False)
    assert ended.returncode == -signal.SIGKILL
    # Whatever had a name would be here, before anybody sweeps.
    left = [one for one in cold_dir.rglob("*") if one.is_file() and one.stat().st_size]
    assert left == []
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE):
        found = generated(model, IDS, hill.new_cache(), 200)
        assert found[0] == generated(model, IDS, hill.new_cache(), 200)[0]
    assert [one for one in cold_dir.rglob("*") if one.is_file()] == []
