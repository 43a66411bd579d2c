# SPDX-License-Identifier: Apache-2.0
"""A prompt whose beginning is stored: what is there stays, and the rest is read in stages."""

import copy

import pytest
import torch
from test_bands import attached, kept_of
from test_completion import CLOSE, QUESTION, asked
from test_reading import NEW, SCHEDULE, TINY, generated, lengths, reference
from tiny_models import TinyModel, prompts
from torch.nn.modules.module import register_module_forward_pre_hook

import hillinfer
from hillinfer.generate.stages import Completed
from hillinfer.pruning.rankers import make_ranker
from hillinfer.pruning.stages import layer_work
from hillinfer.store.store import Store

# 5 blocks that are stored, and 11 behind them, of which the cuts keep 6 and 3.
STORED, TOKENS = 320, 1020
IDS, _ = prompts([TOKENS], seed=5)
BANDS = [1020, 1020, 320 + 380, 320 + 380, 320 + 188]


@pytest.fixture
def model():
    return TINY.build()


@pytest.fixture
def stored(model, cold_dir, tmp_path):
    return stored_by(model, cold_dir, tmp_path)


def stored_by(model, cold_dir, tmp_path):
    Store.create(tmp_path / "store", 64 << 20)
    with attached(model, cold_dir, store=tmp_path / "store") as hill:
        cache = hill.new_cache()
        generated(model, IDS[:, :STORED], cache, new=1)
        # Rows are found once they are written, which an answer of one token does not wait for.
        cache.await_stored()
        cache.close()
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("family", "chunk"),
    [("llama", None), ("llama", 100), ("mistral", None), ("qwen2", 100), ("qwen3", None)],
)
def test_what_is_stored_stays_and_the_rest_is_chosen_from(family, chunk, cold_dir, tmp_path):
    model = TinyModel(family, layers=5).build()
    store = stored_by(model, cold_dir, tmp_path)
    with (
        attached(model, cold_dir, store=store, alpha=1.0) as hill,
        hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning,
    ):
        ranker = make_ranker("weights")
        own = copy.deepcopy(model)
        own.set_attn_implementation("sdpa")
        logits, kept = reference(own, IDS, pruning.schedule, ranker, STORED)
        cache = hill.new_cache()
        _, found = generated(model, IDS, cache, chunk)
        read = pruning.read_of(cache)
        assert cache.read_from_store.found_tokens == read.brought == STORED
        assert kept_of(pruning, cache) == [(one // 64).unique().tolist() for one in kept]
        assert read.tokens == BANDS
        assert lengths(cache) == [one + NEW - 1 for one in BANDS]
        # Only what was read waited.
        assert read.boundary_bytes == (TOKENS - STORED) * model.config.hidden_size * 4
        work = layer_work(model.get_decoder())
        limit = [work.flops(one) - work.flops([STORED] * 5) for one in ([TOKENS] * 5, BANDS)]
        assert read.flop_limit == pytest.approx(limit[0] / limit[1])
    torch.testing.assert_close(found[0, 0], logits, atol=0.03, rtol=0.03)
    # Half of all blocks is another choice, with other logits.
    other, _ = reference(own, IDS, pruning.schedule, ranker)
    assert not torch.allclose(other, logits, atol=0.03, rtol=0.03)


def test_what_was_read_in_stages_is_stored_once_it_is_whole(stored, model, cold_dir):
    with attached(model, cold_dir, alpha=1.0) as hill:
        whole = hill.new_cache()
        generated(model, IDS, whole, 100, 1)
        expected = generated(model, torch.cat([IDS, QUESTION], 1), whole)[1]
    with (
        attached(model, cold_dir, store=stored, alpha=1.0) as hill,
        hillinfer.prune(model, SCHEDULE, later="anew") as pruning,
    ):
        cache, other = hill.new_cache(), hill.new_cache()
        generated(model, IDS, cache, 100, 1)
        assert cache.read_from_store.stored_tokens == 0
        # So another cache finds no more, and is read as the first one.
        generated(model, IDS, other, 100, 1)
        assert other.read_from_store.found_tokens == STORED
        assert kept_of(pruning, other) == kept_of(pruning, cache)
        assert pruning.complete(cache, piece_tokens=130) == Completed(TOKENS, TOKENS)
        assert lengths(cache) == [TOKENS] * 5
        assert cache.read_from_store.stored_tokens == 960 - STORED
        found = asked(pruning, model, cache)
        torch.testing.assert_close(found[0], expected[0], **CLOSE)
        chosen = asked(pruning, model, other)
        assert not torch.allclose(chosen[0], expected[0], **CLOSE)
        third = hill.new_cache()
        generated(model, IDS, third, 100, 1)
        assert third.read_from_store.found_tokens == 960
        assert lengths(third) == [TOKENS] * 5


@pytest.mark.parametrize("more", [1, 2])
def test_a_single_token_behind_what_is_stored_is_completed_densely(more, stored, model, cold_dir):
    left = IDS[:, : STORED + more]
    with attached(model, cold_dir, alpha=0.05) as hill, torch.no_grad():
        whole, selecting = hill.new_cache(), hill.new_cache()
        model(left, past_key_values=whole)
        model(left[:, :-1], past_key_values=selecting)
        model(left[:, -1:], past_key_values=selecting)
        expected, other = (
            model(QUESTION, past_key_values=one, logits_to_keep=1).logits
            for one in (whole, selecting)
        )
    with (
        attached(model, cold_dir, store=stored, alpha=0.05) as hill,
        hillinfer.prune(model, SCHEDULE, later="anew") as pruning,
    ):
        cache = hill.new_cache()
        generated(model, IDS, cache, 100, 1)
        cache.crop(STORED + more - TOKENS)
        assert pruning.complete(cache) == Completed(STORED + more, STORED + more)
        found = asked(pruning, model, cache)
    distance = (found - expected).abs().max()
    assert distance < 1e-3
    # A token that selects differs by more than what rows are rounded to.
    assert (other - expected).abs().max() > 4 * distance


def test_rows_that_bands_share_are_counted_once(stored, model, cold_dir):
    with (
        attached(model, cold_dir, store=stored) as hill,
        hillinfer.prune(model, SCHEDULE, later="anew"),
    ):
        cache = hill.new_cache()
        generated(model, IDS, cache, 100, 1)
        row_bytes = hill.statistics().kv_bytes / sum(BANDS)
        config = model.config
        assert row_bytes == 2 * 2 * config.num_key_value_heads * 8
        # A fork shares the prefix, too, and goes on by itself.
        fork = cache.fork()
        turn = torch.cat([IDS, prompts([60], seed=31)[0]], 1)
        # Past the end of the group that the turn leaves open.
        answers = [generated(model, turn, one, None, 12) for one in (cache, fork)]
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])


@pytest.mark.parametrize(
    ("left", "later"),
    [
        *((left, "anew") for left in (TOKENS, 680, STORED, 64)),
        *((left, "keep") for left in (680, STORED, 280)),
    ],
)
def test_what_is_cropped_is_read_anew(left, later, stored, model, cold_dir):
    """Another prompt behind what is left keeps what its store had of it."""
    with (
        # A cut segment keeps how it was coded, which shows where tokens are selected.
        attached(model, cold_dir, store=stored, alpha=1.0) as hill,
        hillinfer.prune(model, SCHEDULE, later=later) as pruning,
    ):
        cache = hill.new_cache()
        generated(model, IDS, cache, 100, 1)
        cache.crop(left - TOKENS)
        turn = torch.cat([IDS[:, :left], prompts([400], seed=9)[0]], 1)
        _, logits = generated(model, turn, cache)
        first = lengths(cache)
        if later == "keep" and left > STORED:
            return
        read = pruning.read_of(cache)
        assert read.brought == min(left, STORED)
        assert read.tokens[0] == left + 400
        assert first == [one + NEW - 1 for one in read.tokens]
        assert read.tokens[4] < left + 400
        assert set(range(min(left, STORED) // 64)) <= set(kept_of(pruning, cache)[1])
        if left in (STORED, 64):
            again = hill.new_cache()
            found = generated(model, turn, again)
            assert kept_of(pruning, again) == kept_of(pruning, cache)
            torch.testing.assert_close(found[1], logits, atol=1e-3, rtol=1e-3)


def test_rows_that_others_decoded_are_not_stored_as_those_of_a_prompt(stored, model, cold_dir):
    """A token that selects what it attends to has other rows than one of a prompt."""
    with attached(model, cold_dir, store=stored, alpha=0.05) as hill:
        cache = hill.new_cache()
        with hillinfer.prune(model, SCHEDULE, later="anew"):
            generated(model, IDS, cache, 100, 1)
        cache.crop(100 - TOKENS)
        generated(model, IDS[:, :120], cache, None, 12)
        held = torch.tensor(cache.token_ids).reshape(1, -1)
        turn = torch.cat([held, prompts([700], seed=4)[0]], 1)
        with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
            generated(model, turn, cache, None, 1)
            assert pruning.read_of(cache).brought == held.shape[1]
            assert pruning.complete(cache).is_whole
        other = hill.new_cache()
        generated(model, turn, other, None, 1)
        assert other.read_from_store.found_tokens <= 120 // 64 * 64


class BrokenError(Exception):
    """Raised in the middle of a pass."""


@pytest.mark.parametrize(
    # A later piece of the last layers breaks off where the first ones come in one piece, too.
    ("layer", "chunk"),
    [(0, 100), (1, None), (2, None), (2, 100), (4, 100)],
)
def test_a_prompt_that_breaks_off_comes_again(layer, chunk, stored, model, cold_dir):
    # A hook of its own would make another model of it, of which nothing is stored.
    def breaks(own, _):
        if own is model.model.layers[layer].mlp:
            raise BrokenError

    with (
        attached(model, cold_dir, store=stored) as hill,
        hillinfer.prune(model, SCHEDULE),
    ):
        expected = generated(model, IDS, hill.new_cache(), chunk)
        cache = hill.new_cache()
        hook = register_module_forward_pre_hook(breaks)
        try:
            with pytest.raises(BrokenError):
                generated(model, IDS, cache, chunk)
        finally:
            hook.remove()
        assert cache.read_from_store is None or cache.read_from_store.found_tokens == STORED
        found = generated(model, IDS, cache, chunk)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


def test_a_question_and_a_short_rest_are_read_whole(stored, model, cold_dir):
    """Whatever comes behind a document that is stored: what is asked of it loses nothing."""
    long, _ = prompts([300], seed=8)
    with (
        attached(model, cold_dir, store=stored) as hill,
        # Whose window is four queries, however long a question is.
        hillinfer.prune(model, SCHEDULE, ranker="paper") as pruning,
    ):
        cache = hill.new_cache()
        # Two blocks behind the stored ones, which stay in any prompt.
        generated(model, IDS[:, : STORED + 100], cache, None, 1)
        assert lengths(cache) == [STORED + 100] * 5
        # And turns behind it, as long as they may be.
        asked(pruning, model, cache, long)
        with pruning.prompt(STORED + 700), torch.no_grad():
            model(long, past_key_values=cache, logits_to_keep=1)
        assert pruning.read_of(cache) is None
        found = hill.new_cache()
        found.look_up(torch.cat([IDS[:, :STORED], long], 1))
        asked(pruning, model, found, long)
        assert lengths(found) == [STORED + 300] * 5
        # The same tokens as a part of the document are chosen from.
        part, (other, _) = hill.new_cache(), prompts([300], seed=7)
        generated(model, torch.cat([IDS[:, :STORED], other], 1), part, None, 1)
        assert lengths(part)[4] < STORED + 300


def test_a_session_is_gone_on_from_in_stages(model, cold_dir, tmp_path):
    """Behind a session's tokens, too; rows of answers among them are not stored."""
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        _, _ = generated(model, IDS[:, :280], cache, None, 11)
        cache.save_session(tmp_path / "saved")
        held = torch.tensor(cache.token_ids)
    Store.create(tmp_path / "store", 64 << 20)
    turn = torch.cat([held, IDS[:, 320:]], 1)
    with (
        attached(model, cold_dir, store=tmp_path / "store") as hill,
        hillinfer.prune(model, SCHEDULE) as pruning,
    ):
        cache = hill.load_session(tmp_path / "saved")
        generated(model, turn, cache, 100, 1)
        read = pruning.read_of(cache)
        # The open block of the session stays whole.
        assert read.brought == 290
        assert read.tokens == [990, 990, 320 + 6 * 64 - 34, 320 + 6 * 64 - 34, 320 + 3 * 64 - 34]
        assert hill.statistics().kv_bytes == sum(read.tokens) * 64
        assert pruning.complete(cache).is_whole
        generated(model, turn, found := hill.new_cache(), 100, 1)
        assert found.read_from_store.found_tokens == 0
