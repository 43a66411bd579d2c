# SPDX-License-Identifier: Apache-2.0
"""Later prompts that choose anew and compute what enters alone, beside plain torch."""

import pytest
import torch
from test_decoding import plain_of, rows_of
from test_reading import IDS, NEW, TINY, TOKENS, StruckError, cut_back, generated, lengths
from tiny_models import TinyModel, prompts
from transformers import DynamicCache

import hillinfer
from hillinfer.errors import SettingsError, UnsupportedFeatureError

# Layers behind the cut.
CUT, BAND = "2:50%", range(2, 5)
ASKED = 40
FIRST, SECOND = (prompts([ASKED], seed=seed)[0] for seed in (21, 22))


def ask(model, pruning, cache, question, chunk=None):
    """Read the document with a question behind it, or the question where the document is there."""
    ids = torch.cat([IDS, question], 1)
    held = cache.get_seq_length()
    with pruning.prompt(ids.shape[1], ASKED), torch.no_grad():
        for piece in ids[:, held:].split(chunk or ids.shape[1], 1):
            out = model(piece, past_key_values=cache, logits_to_keep=1).logits
    return out[0, -1]


def positions(pruning, cache):
    blocks = pruning.read_of(cache).kept[0]
    every = (blocks[:, None] * 64 + torch.arange(64)).flatten()
    return every[every < TOKENS + ASKED]


@pytest.mark.parametrize(
    ("family", "chunk", "piece"),
    [
        ("llama", None, 1024),
        ("llama", 25, 100),
        ("qwen2", 25, 100),
        ("qwen3", None, 1024),
        ("opt", 25, 100),
    ],
)
def test_rows_that_stay_stay_and_others_are_those_of_a_direct_computation(family, chunk, piece):
    model = TinyModel(family, "mha" if family == "opt" else "gqa", layers=5).build()
    with hillinfer.prune(model, CUT, later="anew") as pruning:
        fresh = DynamicCache(config=model.config)
        ask(model, pruning, fresh, FIRST)
        before = pruning.read_of(fresh)
        cut_back(fresh, TOKENS)
        ask(model, pruning, fresh, SECOND, chunk)
        anew = pruning.read_of(fresh)
        assert (before.entered, anew.entered) == (None, None)
    with hillinfer.prune(model, CUT, later="enter", chunk_tokens=piece) as pruning:
        cache = DynamicCache(config=model.config)
        ask(model, pruning, cache, FIRST)
        had, rows = positions(pruning, cache), rows_of(cache)
        cut_back(cache, TOKENS)
        logits = ask(model, pruning, cache, SECOND, chunk)
        now, own, read = positions(pruning, cache), rows_of(cache), pruning.read_of(cache)
    # As many tokens, and the same ones, as where all is computed.
    assert read.kept[0].tolist() == anew.kept[0].tolist() != before.kept[0].tolist()
    assert (read.tokens, read.flop_limit) == (anew.tokens, anew.flop_limit)
    assert lengths(cache) == lengths(fresh)
    stay = torch.isin(now, had[had < TOKENS])
    assert read.entered == int((~stay).sum())
    assert ASKED < read.entered < len(now)
    for layer in BAND:
        for one, other in zip(own[layer], rows[layer], strict=True):
            assert torch.equal(one[:, stay], other[:, torch.isin(had, now[stay])])
    plain, ids = plain_of(model), torch.cat([IDS, SECOND], 1)
    every = torch.arange(ids.shape[1])
    boundary, _ = plain.through(range(2), plain.embedded(ids, every), every)
    held = {layer: [one[:, stay] for one in own[layer]] for layer in BAND}
    given = BAND, boundary[:, now[~stay]], now[~stay], now[stay], held
    out, made = plain.through(*given)
    _, wrong = plain.through(*given, sees_all=True)
    apart = 0.0
    for layer, expected, other in zip(BAND, made, wrong, strict=True):
        found = [one[:, ~stay] for one in own[layer]]
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, atol=3e-4, rtol=3e-4)
        apart = max(apart, float((found[1] - other[1]).abs().max()))
    torch.testing.assert_close(logits, plain.logits(out[:, -1:]), atol=5e-4, rtol=5e-4)
    # The twin: what stands behind a token changes its rows where it is seen.
    assert apart > 0.01


def test_a_first_prompt_and_one_that_keeps_all_have_the_bits_of_choosing_anew():
    model, answers = TINY.build(), {}
    for later in ("anew", "enter"):
        with hillinfer.prune(model, CUT, later=later) as pruning:
            cache = DynamicCache(config=model.config)
            answers[later] = ask(model, pruning, cache, FIRST)
            assert pruning.read_of(cache).entered is None
    assert torch.equal(*answers.values())


def test_an_answer_between_two_prompts_is_chosen_from():
    model = TINY.build()
    with hillinfer.prune(model, CUT, later="enter") as pruning:
        cache = DynamicCache(config=model.config)
        first, _ = generated(model, IDS, cache)
        turn = torch.cat([IDS, torch.tensor([first]), SECOND], 1)
        generated(model, turn, cache, 100)
        read = pruning.read_of(cache)
        assert read.tokens[0] == turn.shape[1]
        assert ASKED <= read.entered < read.tokens[-1]
        assert lengths(cache)[4] == read.tokens[-1] + NEW - 1
        # Rows lie in the order of positions, so what is cropped is what came last.
        cut_back(cache, TOKENS)
        again, _ = generated(model, IDS[:, :TOKENS], DynamicCache(config=model.config))
        assert again == first


def test_what_breaks_off_is_computed_anew():
    """Rows of before are gone then, and those that come are as if nothing had been there."""
    model = TINY.build()

    def strike(*given):
        raise StruckError

    with hillinfer.prune(model, CUT, later="enter") as pruning:
        cache, other = (DynamicCache(config=model.config) for _ in range(2))
        with pruning.prompt(TOKENS + ASKED, ASKED), torch.no_grad():
            model(IDS, past_key_values=other, logits_to_keep=1)
        ask(model, pruning, cache, FIRST)
        cut_back(cache, TOKENS)
        hook = model.get_submodule("model.layers.3.mlp").register_forward_pre_hook(strike)
        with pytest.raises(StruckError):
            ask(model, pruning, cache, SECOND)
        hook.remove()
        cut_back(cache, TOKENS)
        found, expected = ask(model, pruning, cache, SECOND), ask(model, pruning, other, SECOND)
        assert pruning.read_of(cache).entered is None
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_what_cannot_keep_rows_is_refused(cold_dir):
    model = TINY.build()
    with pytest.raises(SettingsError, match="has states for one cut alone"):
        hillinfer.prune(model, "2:50%,4:25%", later="enter")
    with pytest.raises(SettingsError, match="choose one of keep, anew, enter"):
        hillinfer.prune(model, CUT, later="twice")
    with (
        hillinfer.attach(model, cold_dir=cold_dir) as hill,
        hillinfer.prune(model, CUT, later="enter"),
        pytest.raises(UnsupportedFeatureError, match='take later="anew", or complete'),
    ):
        generated(model, IDS, hill.new_cache())
    # The model is as it was, and pruned by nobody.
    generated(model, IDS)
