# SPDX-License-Identifier: Apache-2.0
"""Reading in stages, through transformers' own calls and with its own caches."""

import copy
import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from generation_runs import attached
from tiny_models import FAMILIES, TinyModel, prompts
from transformers import DynamicCache, StaticCache

import hillinfer
from hillinfer.errors import HillInferWarning, SettingsError, UnsupportedFeatureError
from hillinfer.pruning.rankers import Deciding, kept_blocks, make_ranker
from hillinfer.pruning.stages import layer_work

TINY = TinyModel(layers=5)
SCHEDULE = "2:50%,4:25%"
TOKENS, BLOCKS = 700, 11
IDS, _ = prompts([TOKENS], seed=3)
# One behind the prompt, and one behind a decoded token.
NEW = 3
BY_MASS = ["2:mass=70%,4:mass=70%", "2:mass=60%,4:25%", "2:50%,4:mass=60%"]
NOTHING_DROPPED = ["2:100%", "1:100000", "1:704,3:100%", "2:mass=100%", "1:100%,3:mass=100%"]


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
def reference(model, ids, schedule, ranker, brought=0):
    """Read in one go and layer by layer, with nothing of what is tested but rules and schedule.

    The blocks of the first `brought` tokens stay. Returns logits of the last token and the kept
    positions of each cut.
    """
    decoder, config = model.get_decoder(), model.config
    hidden, places = decoder.embed_tokens(ids), torch.arange(ids.shape[1])
    first = brought // 64
    counts = [first + one for one in schedule.kept_blocks(ids.shape[1] - brought)]
    kept_by_cut = {
        cut.layer: (count, cut.mass) for cut, count in zip(schedule.cuts, counts, strict=True)
    }
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
            count, mass = kept_by_cut[number]
            stay = kept_blocks(ranker.scores(deciding), count, reached, mass, max(1, first))
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


# Every two of what there is together: eager attention takes a mask, and a ranker its own window.
SDPA, EAGER, WEIGHTS, PAPER = "sdpa", "eager", "weights", "paper"
READ_IN_STAGES = [
    ("llama", SDPA, WEIGHTS, None),
    ("llama", EAGER, PAPER, 64),
    ("llama", SDPA, PAPER, 699),
    ("mistral", EAGER, WEIGHTS, 64),
    ("mistral", SDPA, PAPER, None),
    ("qwen2", SDPA, PAPER, 64),
    ("qwen2", EAGER, WEIGHTS, 699),
    ("qwen3", EAGER, PAPER, None),
    ("qwen3", SDPA, WEIGHTS, 699),
]


@pytest.mark.parametrize(("family", "attention", "ranker", "chunk"), READ_IN_STAGES)
def test_a_prompt_keeps_what_the_reference_keeps_and_answers_as_it_does(
    family, attention, ranker, chunk
):
    model = TinyModel(family, layers=5).build()
    model.set_attn_implementation(attention)
    with hillinfer.prune(model, SCHEDULE, ranker=ranker, chunk_tokens=100) as pruning:
        logits, kept = reference_of(model, pruning, ranker)
        cache = DynamicCache(config=model.config)
        _, found = generated(model, IDS, cache, chunk)
        read = pruning.read_of(cache)
    assert [(one // 64).unique().tolist() for one in kept] == [one.tolist() for one in read.kept]
    assert read.tokens == [TOKENS] * 2 + [len(kept[0])] * 2 + [len(kept[1])]
    assert lengths(cache) == [one + NEW - 1 for one in read.tokens]
    torch.testing.assert_close(found[0, 0], logits, atol=2e-4, rtol=2e-4)
    assert read.flop_limit > 1.5
    # A time for each of the two stages, and none that is of both.
    assert len(read.band_seconds) == 2
    assert read.as_json()["deep_seconds"] == sum(read.band_seconds) > max(read.band_seconds) > 0
    dense, _ = reference(model, IDS, hillinfer.Schedule.parse("4:100%"), make_ranker(ranker))
    # What is dropped matters to this model.
    assert (dense - logits).abs().max() > 0.01


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("schedule", BY_MASS)
def test_a_cut_by_mass_keeps_what_the_reference_keeps(schedule, chunk):
    model = TINY.build()
    with hillinfer.prune(model, schedule, chunk_tokens=100) as pruning:
        logits, kept = reference_of(model, pruning, "weights")
        cache = DynamicCache(config=model.config)
        _, found = generated(model, IDS, cache, chunk)
        read = pruning.read_of(cache)
    assert [(one // 64).unique().tolist() for one in kept] == [one.tolist() for one in read.kept]
    # Neither all blocks nor the forced ones alone, and fewer with each cut.
    counts = [BLOCKS, *(len(one) for one in read.kept)]
    assert counts == sorted(set(counts), reverse=True)
    assert counts[1] > 3
    assert read.tokens == [TOKENS] * 2 + [len(kept[0])] * 2 + [len(kept[1])]
    assert lengths(cache) == [one + NEW - 1 for one in read.tokens]
    torch.testing.assert_close(found[0, 0], logits, atol=2e-4, rtol=2e-4)
    # What was kept, and not what might have been.
    assert read.flop_limit > layer_work(model.get_decoder()).limit(pruning.schedule, TOKENS, 5)


def test_a_cut_by_mass_needs_weights():
    model = TINY.build()
    plain, _ = generated(model, IDS)
    with pytest.raises(SettingsError, match="2:mass=90% keeps a share of attention's weights"):
        hillinfer.prune(model, "2:mass=90%", ranker="paper")
    # Nothing is left around its layers.
    assert generated(model, IDS)[0] == plain
    assert not any("forward" in one.__dict__ for one in model.get_decoder().layers)


def reference_of(model, pruning, ranker):
    own = copy.deepcopy(model)
    return reference(own, IDS, pruning.schedule, make_ranker(ranker))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_change_no_choice(family):
    model = TinyModel(family, "mha", layers=5).build()
    with hillinfer.prune(model, SCHEDULE) as pruning:
        answers = []
        # One by one, as decoded tokens come, is enough for one family, and of fewer tokens.
        ids = IDS[:, :200] if family == "opt" else IDS
        for chunk in (None, 1 if family == "opt" else 33, 64, 250):
            cache = DynamicCache(config=model.config)
            tokens, logits = generated(model, ids, cache, chunk)
            kept = [one.tolist() for one in pruning.read_of(cache).kept]
            answers.append((tokens, kept, lengths(cache)))
            if chunk is None:
                first = logits
            torch.testing.assert_close(logits, first, atol=2e-4, rtol=2e-4)
    assert answers[1:] == answers[:1] * 3


@pytest.mark.parametrize(
    ("schedule", "chunk"),
    [(NOTHING_DROPPED[0], 100), *zip(NOTHING_DROPPED, (None, 100, None, 100, None), strict=True)],
)
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


def test_a_prompt_whose_length_nobody_said_is_warned_of():
    """Its first chunk is taken for all of it; where all is chosen anew nothing is lost."""
    model = TINY.build()

    def chunks(pruning, said):
        cache = DynamicCache(config=model.config)
        with pruning.prompt(TOKENS) if said else nullcontext(), torch.no_grad():
            for chunk in IDS.split(350, 1):
                model(chunk, past_key_values=cache, logits_to_keep=1)
        return cache

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hillinfer.prune(model, SCHEDULE) as pruning:
            kept = lengths(chunks(pruning, True))
            # A whole read by itself, and what a single token follows.
            generated(model, IDS, chunk=100)
        with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
            assert lengths(chunks(pruning, False)) == kept
    with (
        hillinfer.prune(model, SCHEDULE) as pruning,
        pytest.warns(HillInferWarning, match="350 tokens come right behind a prompt of 350"),
    ):
        assert lengths(chunks(pruning, False)) != kept


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


@pytest.mark.parametrize("schedule", [SCHEDULE, BY_MASS[0]])
@pytest.mark.parametrize("chunk", [None, 100])
def test_a_turn_may_choose_anew(chunk, schedule):
    model = TINY.build()
    with hillinfer.prune(model, schedule, later="anew") as pruning:
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
            layer.crop(length - layer.keys.shape[2])


@pytest.mark.parametrize("later", ["keep", "anew"])
def test_what_is_cut_off_is_cut_off_everywhere(later):
    """Whoever cuts a cache knows nothing of deeper layers that are shorter than what is left."""
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, later=later) as pruning:
        cache, other = (DynamicCache(config=model.config) for _ in range(2))
        generated(model, IDS, cache, new=6)
        generated(model, IDS, other, new=1)
        cut_back(cache, TOKENS)
        longer = torch.cat([IDS, ANSWER], 1)
        found, logits = generated(model, longer, cache)
        expected, plain = generated(model, longer, other)
        assert lengths(cache) == lengths(other)
        assert pruning.read_of(cache).tokens == pruning.read_of(other).tokens
    assert found == expected
    torch.testing.assert_close(logits, plain, atol=2e-4, rtol=2e-4)


def test_a_crop_takes_rows_that_are_still_wanted_and_that_is_said_or_mended():
    """`crop` takes as many rows from layers that have fewer of them behind the place."""
    model = TINY.build()
    longer = torch.cat([IDS[:, :300], ANSWER], 1)
    with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
        cache, fresh = (DynamicCache(config=model.config) for _ in range(2))
        generated(model, IDS, cache, new=1)
        cache.crop(-(TOKENS - 300))
        found, logits = generated(model, longer, cache)
        expected, plain = generated(model, longer, fresh)
        assert lengths(cache) == lengths(fresh)
        assert pruning.read_of(cache).tokens == pruning.read_of(fresh).tokens
        assert found == expected
        torch.testing.assert_close(logits, plain, atol=2e-4, rtol=2e-4)
        # What was just decoded lies in all layers, so nothing is lost.
        generated(model, longer, cache, new=4)
        cache.crop(-3)
        assert lengths(cache)[4] > 0
        generated(model, torch.cat([longer, ANSWER], 1), cache)
    with hillinfer.prune(model, SCHEDULE):
        cache = DynamicCache(config=model.config)
        generated(model, IDS, cache, new=2)
        cache.crop(-(TOKENS + 1 - 300))
        with pytest.raises(UnsupportedFeatureError, match="deeper layers lost as many rows"):
            generated(model, longer, cache)


@pytest.mark.parametrize("later", ["keep", "anew"])
def test_a_cache_that_was_emptied_begins_anew(later):
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, later=later) as pruning:
        cache = DynamicCache(config=model.config)
        expected, _ = generated(model, IDS, cache)
        cut_back(cache, 0)
        assert generated(model, IDS, cache)[0] == expected
        assert pruning.read_of(cache).tokens[0] == TOKENS
        cut_back(cache, 0)
        generated(model, ANSWER, cache)
        assert pruning.read_of(cache) is None
        assert len(set(lengths(cache))) == 1


@pytest.mark.parametrize("question", [3, 40])
def test_a_short_question_is_not_ranked_by_what_was_cut_off(question):
    model = TINY.build()
    other, _ = prompts([40], seed=11)
    with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
        kept = []
        for before in (ANSWER, other):
            cache = DynamicCache(config=model.config)
            generated(model, torch.cat([IDS, before], 1), cache)
            cut_back(cache, TOKENS)
            generated(model, torch.cat([IDS, ANSWER[:, :question]], 1), cache, new=1)
            kept.append([one.tolist() for one in pruning.read_of(cache).kept])
    assert kept[0] == kept[1]


def test_caches_without_a_config_and_new_ids_alone_are_as_good():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, later="anew"):
        cache, plain = DynamicCache(config=model.config), DynamicCache()
        expected, _ = generated(model, IDS, cache, 200, new=1)
        assert generated(model, IDS, plain, 200, new=1)[0] == expected
        assert lengths(plain) == lengths(cache)
        longer = torch.cat([IDS, ANSWER], 1)
        whole, _ = generated(model, longer, cache, 16)
        # Where the mask covers everything, ids may be those that are new.
        out = model.generate(
            ANSWER, attention_mask=torch.ones_like(longer), past_key_values=plain,
            prefill_chunk_size=16, do_sample=False, max_new_tokens=NEW, pad_token_id=0,
        )  # fmt: skip
        assert out[0, ANSWER.shape[1] :].tolist() == whole
        assert lengths(plain) == lengths(cache)


def test_threads_read_caches_of_their_own():
    model = TINY.build()
    texts = [prompts([TOKENS], seed=seed)[0] for seed in range(4)]
    with hillinfer.prune(model, SCHEDULE) as pruning:
        alone = [generated(model, ids, DynamicCache(config=model.config), 175)[0] for ids in texts]
        caches = [DynamicCache(config=model.config) for _ in texts]
        with ThreadPoolExecutor(4) as pool:
            pairs = zip(texts, caches, strict=True)
            answers = pool.map(lambda two: generated(model, *two, 175)[0], pairs)
            assert list(answers) == alone
        assert all(pruning.read_of(cache) is not None for cache in caches)


def test_bfloat16_models_are_read_in_stages():
    model = TinyModel(layers=5, dtype=torch.bfloat16).build()
    with hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning:
        cache = DynamicCache(config=model.config)
        whole, _ = generated(model, IDS, cache)
        again = DynamicCache(config=model.config)
        assert generated(model, IDS, again, 100)[0][:2] == whole[:2]
        assert pruning.read_of(cache).tokens == pruning.read_of(again).tokens


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
        assert lengths(cache)[2:] == [0] * 3
        held = cache.get_seq_length()
        assert lengths(cache)[:2] == [held] * 2
        assert held == (600 if number >= 2 and chunk else 300 if chunk else 0)
        assert pruning.read_of(cache) is None
        found, _ = generated(model, IDS, cache, chunk)
    assert found == expected


@pytest.mark.parametrize("way", ["broken", "early"])
def test_a_prompt_that_waits_when_pruning_ends_leaves_an_empty_cache_and_is_told_of(way):
    """Its first layers alone have tokens: whoever went on with it would never know."""
    model = TINY.build()
    cache, other = (DynamicCache(config=model.config) for _ in range(2))
    pruning = hillinfer.prune(model, SCHEDULE, chunk_tokens=100)
    generated(model, IDS, other, 300)
    kept = lengths(other)
    if way == "early":
        with pruning.prompt(TOKENS), torch.no_grad():
            for part in IDS[:, :600].split(300, 1):
                model(part, past_key_values=cache)
    else:
        hook = model.get_decoder().layers[3].mlp.register_forward_pre_hook(_strike)
        with pytest.raises(StruckError):
            generated(model, IDS, cache, 300)
        hook.remove()
    assert lengths(cache) == [600, 600, 0, 0, 0]
    with pytest.warns(HillInferWarning, match="600 tokens, some of them in its first layers alone"):
        pruning.remove()
    assert lengths(cache) == [0] * 5
    # What was read to its end is left alone, and an empty cache is as good as a new one.
    assert lengths(other) == kept
    dense = DynamicCache(config=model.config)
    assert generated(model, IDS, cache)[0] == generated(model, IDS, dense)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruning.remove()


def test_a_later_turn_that_waits_when_pruning_ends_empties_its_cache_too():
    """Deeper layers have blocks of the turn before, and nothing of this one."""
    model = TINY.build()
    cache = DynamicCache(config=model.config)
    pruning = hillinfer.prune(model, SCHEDULE, later="anew")
    generated(model, IDS, cache)
    held = cache.get_seq_length()
    assert pruning.waiting(cache) is None
    with pruning.prompt(held + TOKENS), torch.no_grad():
        model(IDS[:, :300], past_key_values=cache)
    assert pruning.waiting(cache) == range(2, 5)
    assert 0 < lengths(cache)[2] < lengths(cache)[0] == held + 300
    with pytest.warns(HillInferWarning, match=f"had {held + 300} tokens"):
        pruning.remove()
    assert lengths(cache) == [0] * 5


def _strike(module, given):
    raise StruckError


def test_a_token_that_breaks_off_is_in_no_layer():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE), torch.no_grad():
        whole = DynamicCache(config=model.config)
        expected, _ = generated(model, IDS, whole, new=5)
        # The last one is in no layer yet.
        expected.pop()
        for number in range(5):
            cache = DynamicCache(config=model.config)
            first, _ = generated(model, IDS, cache, new=1)
            hook = model.get_decoder().layers[number].mlp.register_forward_pre_hook(_strike)
            with pytest.raises(StruckError):
                model(torch.tensor([first]), past_key_values=cache)
            hook.remove()
            assert cache.get_seq_length() == TOKENS
            assert lengths(cache)[0] == TOKENS
            # Another cache knows nothing of it.
            other, _ = generated(model, IDS, DynamicCache(config=model.config), new=2)
            assert other == expected[:2]
            found, token = [], torch.tensor([first])
            for _ in range(4):
                found.append(int(token))
                token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            assert found == expected, number
            assert lengths(cache) == lengths(whole)


# --- refusals ---


def test_a_second_pruning_and_other_attentions_are_refused(cold_dir):
    model = TINY.build()
    with (
        hillinfer.prune(model, SCHEDULE),
        pytest.raises(UnsupportedFeatureError, match="pruned already"),
    ):
        hillinfer.prune(model, SCHEDULE)
    sliding = TinyModel("mistral", layers=5).build()
    sliding.config.sliding_window = 64
    with pytest.raises(UnsupportedFeatureError, match="sliding"):
        hillinfer.prune(sliding, SCHEDULE)


def test_attaching_to_a_pruned_model_and_taking_both_off_leaves_it_as_it_was(cold_dir):
    model = TINY.build()
    plain, _ = generated(model, IDS)
    pruning = hillinfer.prune(model, SCHEDULE)
    with hillinfer.attach(model, cold_dir=cold_dir) as hill:
        generated(model, IDS, hill.new_cache(), 100)
    pruning.remove()
    pruning.remove()
    assert generated(model, IDS)[0] == plain


@pytest.mark.parametrize("option", ["assistant_model", "prompt_lookup_num_tokens"])
def test_drafts_are_refused(option):
    model = TINY.build()
    given = {"assistant_model": model, "prompt_lookup_num_tokens": 4}[option]
    with (
        hillinfer.prune(model, SCHEDULE),
        pytest.raises(UnsupportedFeatureError, match=f"{option} asks for logits"),
    ):
        model.generate(IDS, max_new_tokens=4, pad_token_id=0, **{option: given})


def test_a_copy_of_a_pruned_cache_is_refused():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE):
        cache = DynamicCache(config=model.config)
        generated(model, IDS, cache)
        with pytest.raises(UnsupportedFeatureError, match="the cache itself and not a copy"):
            generated(model, torch.cat([IDS, ANSWER], 1), copy.deepcopy(cache))


def test_whoever_keeps_nothing_of_it_still_has_a_model_that_works():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE):
        expected, _ = generated(model, IDS)
    hillinfer.prune(model, SCHEDULE)
    gc.collect()
    assert generated(model, IDS)[0] == expected


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


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_layers_make_of_all_tokens_is_refused(family, name):
    """By the call or the model's config; short prompts and decoded tokens tell it as ever."""
    model = TinyModel(family, "mha", layers=5).build()
    model.set_attn_implementation("eager")
    told = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}[name]
    with hillinfer.prune(model, SCHEDULE), torch.no_grad():
        cache = DynamicCache(config=model.config)
        given = {"past_key_values": cache, "logits_to_keep": 1}
        with pytest.raises(UnsupportedFeatureError, match=f"{name}=True asks for all tokens"):
            model(IDS, **given, **{name: True})
        model.config.update({name: True})
        with pytest.raises(UnsupportedFeatureError, match=name):
            model(IDS, **given)
        assert cache.get_seq_length() == 0
        model.config.update({name: False})
        assert getattr(model(IDS, **given), told) is None
        model.config.update({name: True})
        assert len(getattr(model(ANSWER[:, :1], **given), told)) >= 5
        short = model(IDS[:, :60], past_key_values=DynamicCache(config=model.config))
        assert all(one.shape[-2] == 60 for one in getattr(short, told))


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
    plain, logits = generated(model, IDS[:, :128])
    with hillinfer.prune(model, "2:mass=10%") as pruning:
        cache = DynamicCache(config=model.config)
        found, own = generated(model, IDS[:, :128], cache)
        # The first block and the last one.
        assert pruning.read_of(cache) is None
        assert found == plain
        assert torch.equal(own, logits)
        generated(model, IDS[:, :129], again := DynamicCache(config=model.config))
        assert pruning.read_of(again) is not None


@pytest.mark.parametrize("how", ["in one piece", "parted", "without pruning"])
@torch.no_grad()
def test_states_behind_those_that_are_missing_are_not_taken_for_them(how, cold_dir):
    """As many tokens as have states are left, and these are states of others."""
    model = TINY.build()
    new, question = prompts([200], seed=9)[0], prompts([130], seed=5)[0]

    def feed(ids, cache):
        return model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]

    with attached(model, cold_dir, alpha=1.0, dram_budget="64MiB") as hill:
        cache, fresh = hill.new_cache(1500, 2), hill.new_cache(1500)
        with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
            with pruning.prompt(400):
                feed(IDS[:, :400], cache)
            if how == "without pruning":
                pruning.remove()
            if how == "parted":
                cache.batch_repeat_interleave(2)
            for token in (5, 7):
                rows = [[token], [token + 1]] if how == "parted" else [[token]]
                model(torch.tensor(rows), past_key_values=cache)
            if how == "parted":
                cache.batch_select_indices(torch.tensor([0]))
        with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
            for token in new[0]:
                feed(token.view(1, 1), cache)
            cache.crop(-(200 + 2 + 210))
            if how == "in one piece":
                with pruning.prompt(320):
                    found = feed(question, cache)
                with pruning.prompt(320):
                    expected = feed(torch.cat([IDS[:, :190], question], 1), fresh)
                torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
            else:
                refused = pytest.raises(UnsupportedFeatureError, match="hidden states of")
                with refused, pruning.prompt(320):
                    feed(question, cache)


@torch.no_grad()
def test_answers_side_by_side_leave_no_states_of_the_first_for_the_others():
    """Rows of an ordinary cache that part are not chosen from by what one of them had."""
    model, turn = TINY.build(), prompts([20], seed=5)[0]
    answers, _ = prompts([6, 6], seed=9)

    def decoded(rows, pruning):
        cache = DynamicCache(config=model.config)
        model(IDS, past_key_values=cache, logits_to_keep=1)
        if len(rows) > 1:
            cache.batch_repeat_interleave(len(rows))
        for column in rows.split(1, 1):
            model(column, past_key_values=cache)
        if len(rows) > 1:
            cache.batch_select_indices(torch.tensor([1]))
        with pruning.prompt(TOKENS + 26, 20):
            model(turn, past_key_values=cache, logits_to_keep=1)
        return cache

    with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
        with pytest.raises(UnsupportedFeatureError, match="of answers in several rows"):
            decoded(answers, pruning)
        # The twin: what was decoded alone has its states.
        assert pruning.read_of(decoded(answers[1:], pruning)).tokens[0] == TOKENS + 26
