# SPDX-License-Identifier: Apache-2.0
"""Reading in stages, through transformers' own calls and with its own caches."""

import copy
import weakref

import pytest
import torch
from tiny_models import FAMILIES, TinyModel, prompts
from transformers import DynamicCache, StaticCache

import hillinfer
from hillinfer.errors import UnsupportedFeatureError
from hillinfer.pruning.rankers import Deciding, kept_blocks, make_ranker

TINY = TinyModel(layers=5)
SCHEDULE = "2:50%,4:25%"
TOKENS, BLOCKS = 700, 11
IDS, _ = prompts([TOKENS], seed=3)
NEW = 6


def generated(model, ids, cache=None, chunk=None, new=NEW):
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    out = model.generate(
        ids, past_key_values=cache, do_sample=False, max_new_tokens=new, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return out.sequences[0, ids.shape[1] :].tolist(), torch.stack(out.logits)


def lengths(cache):
    return [cache.get_seq_length(layer) for layer in range(len(cache.layers))]


@torch.no_grad()
def reference(model, ids, schedule, ranker):
    """Read in one go and layer by layer, with nothing of what is tested but rules and schedule.

    Returns logits of the last token and the kept positions of each cut.
    """
    decoder, config = model.get_decoder(), model.config
    hidden, places = decoder.embed_tokens(ids), torch.arange(ids.shape[1])
    kept_by_cut = dict(
        zip((cut.layer for cut in schedule.cuts), schedule.kept_blocks(ids.shape[1]), strict=True)
    )
    found, before = [], None
    for number, layer in enumerate(decoder.layers):
        if number in kept_by_cut:
            attention, entering = decoder.layers[number - 1].self_attn, before
            normed = decoder.layers[number - 1].input_layernorm(entering)
            keys = turned(decoder, attention, attention.k_proj, "k_norm", normed, places)
            queries = turned(decoder, attention, attention.q_proj, "q_norm", normed, places)
            window = ranker.window(None)
            deciding = Deciding(keys, queries[:, -window:], attention.scaling)
            blocks = places // 64
            numbers = blocks.unique()
            reached = len(blocks[-window:].unique())
            stay = kept_blocks(ranker.scores(deciding), kept_by_cut[number], reached)
            chosen = torch.isin(blocks, numbers[stay])
            hidden, places = hidden[:, chosen], places[chosen]
            found.append(places)
        before = hidden
        mask = torch.full((len(places), len(places)), torch.finfo(hidden.dtype).min).triu(1)
        hidden = layer(
            hidden,
            attention_mask=mask[None, None].to(hidden.dtype),
            position_embeddings=decoder.rotary_emb(hidden, position_ids=places[None]),
            position_ids=places[None],
        )
    assert config.num_hidden_layers == number + 1
    return model.lm_head(decoder.norm(hidden))[0, -1], found


def turned(decoder, attention, projection, norm, normed, places):
    """Return keys or queries (heads, tokens, head_dim) behind RoPE."""
    made = projection(normed).unflatten(-1, (-1, attention.head_dim))
    if hasattr(attention, norm):
        made = getattr(attention, norm)(made)
    cosines, sines = decoder.rotary_emb(normed, position_ids=places[None])
    made = made.transpose(1, 2)
    half = attention.head_dim // 2
    other = torch.cat([-made[..., half:], made[..., :half]], -1)
    return (made * cosines[:, None] + other * sines[:, None])[0]


@pytest.mark.parametrize("chunk", [None, 64, 699])
@pytest.mark.parametrize("ranker", ["weights", "paper"])
@pytest.mark.parametrize("family", set(FAMILIES) - {"opt"})
def test_a_prompt_keeps_what_the_reference_keeps_and_answers_as_it_does(family, ranker, chunk):
    model = TinyModel(family, layers=5).build()
    with hillinfer.prune(model, SCHEDULE, ranker=ranker) as pruning:
        logits, kept = reference_of(model, pruning, ranker)
        cache = DynamicCache(config=model.config)
        _, found = generated(model, IDS, cache, chunk)
        read = pruning.read_of(cache)
    assert [(one // 64).unique().tolist() for one in kept] == [one.tolist() for one in read.kept]
    assert read.tokens == [TOKENS] * 2 + [len(kept[0])] * 2 + [len(kept[1])]
    assert lengths(cache) == [one + NEW - 1 for one in read.tokens]
    torch.testing.assert_close(found[0, 0], logits, atol=2e-4, rtol=2e-4)
    assert read.flop_limit > 1.5
    dense, _ = reference(model, IDS, hillinfer.Schedule.parse("4:100%"), make_ranker(ranker))
    # What is dropped matters to this model.
    assert (dense - logits).abs().max() > 0.01


def reference_of(model, pruning, ranker):
    own = copy.deepcopy(model)
    return reference(own, IDS, pruning.schedule, make_ranker(ranker))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_change_no_choice(family):
    model = TinyModel(family, "mha", layers=5).build()
    with hillinfer.prune(model, SCHEDULE) as pruning:
        answers = []
        # One by one, as decoded tokens come, is enough for one family.
        for chunk in (None, 1 if family == "opt" else 33, 64, 350):
            cache = DynamicCache(config=model.config)
            tokens, logits = generated(model, IDS, cache, chunk)
            kept = [one.tolist() for one in pruning.read_of(cache).kept]
            answers.append((tokens, kept, lengths(cache)))
            if chunk is None:
                first = logits
            torch.testing.assert_close(logits, first, atol=2e-4, rtol=2e-4)
    assert answers[1:] == answers[:1] * 3


@pytest.mark.parametrize("chunk", [None, 100])
@pytest.mark.parametrize("schedule", ["2:100%", "1:100000", "1:704,3:100%"])
def test_where_nothing_is_dropped_the_bits_are_those_of_today(schedule, chunk):
    model = TINY.build()
    plain, logits = generated(model, IDS, DynamicCache(config=model.config), chunk)
    with hillinfer.prune(model, schedule) as pruning:
        cache = DynamicCache(config=model.config)
        found, own = generated(model, IDS, cache, chunk)
        assert pruning.read_of(cache) is None
    assert found == plain
    assert torch.equal(own, logits)
    with hillinfer.prune(model, SCHEDULE):
        _, other = generated(model, IDS, DynamicCache(config=model.config), chunk)
    assert not torch.equal(other, logits)


def test_the_model_is_as_before_when_it_ends():
    model = TINY.build()
    before = dict(model.__dict__), [dict(one.__dict__) for one in model.get_decoder().layers]
    plain, _ = generated(model, IDS)
    with hillinfer.prune(model, SCHEDULE) as pruning:
        copied = copy.deepcopy(model)
        assert generated(copied, IDS)[0] == plain, "a copy is not pruned"
        known = weakref.ref(pruning)
    assert (dict(model.__dict__), [dict(one.__dict__) for one in model.get_decoder().layers]) == (
        before
    )
    assert generated(model, IDS)[0] == plain
    del pruning
    assert known() is None


def test_chunks_of_ones_own_loop_are_one_prompt_where_it_is_said():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE) as pruning, torch.no_grad():
        whole = DynamicCache(config=model.config)
        expected = model(IDS, past_key_values=whole, logits_to_keep=1).logits
        cache = DynamicCache(config=model.config)
        with pruning.prompt(TOKENS):
            for start in range(0, TOKENS, 300):
                found = model(
                    IDS[:, start : start + 300], past_key_values=cache, logits_to_keep=1
                ).logits
                if start == 0:
                    assert lengths(cache)[:2] == [300] * 2
                    assert pruning.read_of(cache) is None
        assert lengths(cache) == lengths(whole)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_the_question_decides_where_it_is_said_how_long_it_is():
    model = TINY.build()
    kept = []
    with hillinfer.prune(model, SCHEDULE) as pruning, torch.no_grad():
        for question in (None, 3, 200):
            cache = DynamicCache(config=model.config)
            with pruning.prompt(TOKENS, question):
                model(IDS, past_key_values=cache, logits_to_keep=1)
            kept.append([one.tolist() for one in pruning.read_of(cache).kept])
    assert kept[0] != kept[1]
    # All blocks of a window stay: more than a quarter here.
    assert kept[2][0][-4:] == [7, 8, 9, 10]


# --- later turns ---

ANSWER, _ = prompts([40], seed=9)


def test_a_turn_behind_an_answer_meets_what_was_kept():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE):
        cache = DynamicCache(config=model.config)
        first, _ = generated(model, IDS, cache)
        held = lengths(cache)
        longer = torch.cat([IDS, torch.tensor([first]), ANSWER], 1)
        _, together = generated(model, longer, cache)
        assert lengths(cache) == [one + 1 + ANSWER.shape[1] + NEW - 1 for one in held]
        # Singly, as decoded tokens come.
        again = DynamicCache(config=model.config)
        generated(model, IDS, again)
        with torch.no_grad():
            for token in longer[0, again.get_seq_length() :]:
                singly = model(token.view(1, 1), past_key_values=again).logits
    torch.testing.assert_close(together[0, 0], singly[0, -1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("chunk", [None, 100])
def test_a_turn_may_choose_anew(chunk):
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
        cache = DynamicCache(config=model.config)
        first, _ = generated(model, IDS, cache, chunk)
        before = [one.tolist() for one in pruning.read_of(cache).kept]
        longer = torch.cat([IDS, torch.tensor([first]), ANSWER], 1)
        found, logits = generated(model, longer, cache, chunk)
        fresh = DynamicCache(config=model.config)
        expected, whole = generated(model, longer, fresh, chunk)
        after, own = pruning.read_of(cache), pruning.read_of(fresh)
        assert [one.tolist() for one in after.kept] == [one.tolist() for one in own.kept] != before
        assert after.tokens == own.tokens
        assert lengths(cache) == lengths(fresh)
        assert after.boundary_bytes == longer.shape[1] * model.config.hidden_size * 4
    assert found == expected
    torch.testing.assert_close(logits, whole, atol=2e-4, rtol=2e-4)


def cut_back(cache, length):
    for layer in cache.layers:
        if layer.is_initialized and layer.keys.shape[2] > length:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


@pytest.mark.parametrize("later", ["keep", "anew"])
def test_what_is_cut_off_is_cut_off_everywhere(later):
    """Whoever cuts a cache knows nothing of deeper layers that are shorter than what is left."""
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, later=later) as pruning:
        cache, other = (DynamicCache(config=model.config) for _ in range(2))
        generated(model, IDS, cache, new=30)
        generated(model, IDS, other, new=1)
        cut_back(cache, TOKENS)
        longer = torch.cat([IDS, ANSWER], 1)
        found, logits = generated(model, longer, cache)
        expected, plain = generated(model, longer, other)
        assert lengths(cache) == lengths(other)
        assert pruning.read_of(cache).tokens == pruning.read_of(other).tokens
    assert found == expected
    torch.testing.assert_close(logits, plain, atol=2e-4, rtol=2e-4)


# --- what breaks off ---


class StruckError(Exception):
    """What the tests strike with."""


# Of a whole prompt the shallow layers are called once, and what breaks there is the cache's own.
BREAKS = [(number, 300) for number in range(5)] + [(number, None) for number in (2, 3, 4)]


@pytest.mark.parametrize(("number", "chunk"), BREAKS)
def test_a_pass_that_breaks_off_in_a_stage_can_be_made_again(number, chunk):
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning:
        expected, _ = generated(model, IDS, DynamicCache(config=model.config), chunk)
        cache = DynamicCache(config=model.config)
        mlp = model.get_decoder().layers[number].mlp
        calls = 0

        def strike(module, given):
            nonlocal calls
            calls += 1
            if calls == 2:
                raise StruckError

        hook = mlp.register_forward_pre_hook(strike)
        with pytest.raises(StruckError):
            generated(model, IDS, cache, chunk)
        hook.remove()
        if number < 2:
            # An ordinary cache does not forget by itself what a shallow layer took of it.
            cut_back(cache, 300)
        else:
            assert lengths(cache)[2:] == [0] * 3
        held = cache.get_seq_length()
        assert held == (600 if number >= 2 and chunk else 300 if chunk else 0)
        assert pruning.read_of(cache) is None
        found, _ = generated(model, IDS, cache, chunk)
    assert found == expected


# --- refusals ---


def test_several_sequences_are_refused():
    model = TINY.build()
    with (
        hillinfer.prune(model, SCHEDULE),
        pytest.raises(UnsupportedFeatureError, match="2 sequences at once"),
    ):
        generated(model, IDS.repeat(2, 1))


def test_padding_is_refused():
    model = TINY.build()
    ids, mask = prompts([600, 700])
    with (
        hillinfer.prune(model, SCHEDULE),
        pytest.raises(UnsupportedFeatureError, match="the prompt is padded"),
    ):
        model.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=2, pad_token_id=0)


def test_other_caches_are_refused():
    model = TINY.build()
    cache = StaticCache(config=model.config, max_cache_len=TOKENS + NEW)
    with (
        hillinfer.prune(model, SCHEDULE),
        pytest.raises(UnsupportedFeatureError, match="not a StaticCache"),
        torch.no_grad(),
    ):
        model(IDS, past_key_values=cache)


def test_a_cache_that_somebody_else_filled_is_refused():
    model, other = TINY.build(), TINY.build()
    with hillinfer.prune(model, SCHEDULE), torch.no_grad():
        cache = DynamicCache(config=model.config)
        generated(model, IDS, cache)
        for token in ANSWER[0, :3]:
            other(token.view(1, 1), past_key_values=cache)
        with pytest.raises(UnsupportedFeatureError, match="were read in stages"):
            model(ANSWER, past_key_values=cache)


def test_a_model_of_an_unknown_family_is_refused():
    model = TINY.build()
    model.config.model_type = "gpt9"
    with pytest.raises(hillinfer.errors.SettingsError, match="gpt9"):
        hillinfer.prune(model, SCHEDULE)


def test_short_prompts_and_a_cache_that_was_read_densely_stay_dense():
    model = TINY.build()
    with hillinfer.prune(model, "2:512") as pruning:
        cache = DynamicCache(config=model.config)
        generated(model, IDS[:, :500], cache)
        generated(model, IDS, cache)
        assert pruning.read_of(cache) is None
        assert len(set(lengths(cache))) == 1
