# SPDX-License-Identifier: Apache-2.0
"""A rival as an attached model's cache gives the tokens of the ordinary cache."""

import pytest
import torch
from rival_cases import make_setup
from tiny_models import TinyModel, prompts
from transformers import DynamicCache

import hillinfer
from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.model_shape import ModelShape
from hillinfer_bench.rivals.full import FullMemory
from hillinfer_bench.rivals.table import RIVALS, RivalCache, make_rival

PROMPT, STEPS = 150, 8


def decode(model, cache, first, steps=STEPS):
    """Greedy tokens and the logits they came from."""
    token, tokens, logits = first, [], []
    for _ in range(steps):
        logits.append(model(token, past_key_values=cache).logits[:, -1])
        token = logits[-1].argmax(-1, keepdim=True)
        tokens.append(token)
    return torch.cat(tokens, 1), torch.stack(logits)


@pytest.fixture(scope="module")
def prefilled():
    model = TinyModel().build()
    ids, _ = prompts([PROMPT, PROMPT])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        states = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        return model, states, first, decode(model, cache, first)


def filled(name, prefilled, cold_dir, **changes):
    model, states, *_ = prefilled
    shape = ModelShape.from_config(model.config, model.dtype)
    setup = make_setup(cold_dir, shape, context=400, **changes)
    cache = RivalCache(make_rival(name, setup) if isinstance(name, str) else name(setup))
    for layer, (keys, values) in enumerate(states):
        for row in range(len(keys)):
            cache.fill(layer, row, keys[row], values[row])
    return cache


# A cache of few bits has no row of older tokens.
FEW_BITS = [name for name in RIVALS if "-bit-" in name]


@pytest.mark.parametrize("name", [name for name in RIVALS if name not in FEW_BITS])
@torch.no_grad()
def test_everything_selected_decodes_as_the_ordinary_cache(name, prefilled, cold_dir):
    model, _, first, (tokens, logits) = prefilled
    cache = filled(name, prefilled, cold_dir, alpha=1.0)
    with hillinfer.attach(model):
        found, found_logits = decode(model, cache, first)
    assert torch.equal(found, tokens)
    assert (found_logits - logits).abs().max() < 0.05
    assert cache.rival.traffic().steps == STEPS
    assert cache.get_seq_length() == PROMPT + STEPS
    cache.rival.close()


@torch.no_grad()
def test_codes_of_more_bits_decode_nearer_to_the_ordinary_cache(prefilled, cold_dir):
    model, _, first, (_, logits) = prefilled
    error = {}
    for name in FEW_BITS:
        cache = filled(name, prefilled, cold_dir)
        with hillinfer.attach(model):
            # The first logits: which token comes next may differ.
            found = decode(model, cache, first, 1)[1]
        error[name] = float((found - logits[:1]).square().mean())
        assert cache.get_seq_length() == PROMPT + 1
        cache.rival.close()
    for place in ("memory", "drive"):
        assert 0 < error[f"five-bit-{place}"] < error[f"four-bit-{place}"] / 2 < 1
        assert error[f"five-bit-{place}"] == pytest.approx(error["five-bit-memory"], rel=1e-2)


@torch.no_grad()
def test_another_token_changes_the_logits(prefilled, cold_dir):
    model, _, first, (_, logits) = prefilled
    cache = filled("full-memory", prefilled, cold_dir, form="sdpa over float32")
    cache.rival.cache.values[0, 0, 0, 7] += 40
    with hillinfer.attach(model):
        _, found = decode(model, cache, first)
    assert (found - logits).abs().max() > 0.05


@torch.no_grad()
def test_what_is_no_decode_step_is_refused(prefilled, cold_dir):
    model, _, first, _ = prefilled
    cache = filled("full-memory", prefilled, cold_dir)
    with hillinfer.attach(model):
        with pytest.raises(CacheUseError, match="2 tokens in one forward pass: a rival only"):
            model(first.repeat(1, 2), past_key_values=cache)
        with pytest.raises(CacheUseError, match="1 sequences for a rival made with batch=2"):
            model(first[:1], past_key_values=cache)
        mask = torch.ones(2, PROMPT + 1)
        mask[0, 0] = 0
        with pytest.raises(UnsupportedFeatureError, match="padding"):
            model(first, past_key_values=cache, attention_mask=mask)
        with pytest.raises(CacheUseError, match="150 tokens: give generate"):
            model.generate(first, past_key_values=cache)
        cache.rival.lengths[1][1] -= 1
        with pytest.raises(CacheUseError, match="different numbers of tokens"):
            model(first, past_key_values=cache)


@torch.no_grad()
def test_a_broken_forward_pass_ends_the_cache(prefilled, cold_dir):
    class Broken(FullMemory):
        def attend(self, *given):
            raise ZeroDivisionError

    model, _, first, _ = prefilled
    cache = filled(Broken, prefilled, cold_dir)
    with hillinfer.attach(model):
        with pytest.raises(ZeroDivisionError):
            model(first, past_key_values=cache)
        with pytest.raises(CacheUseError, match="broke off"):
            model(first, past_key_values=cache)


def test_a_rival_of_another_type_rounds_what_it_is_given(prefilled, cold_dir):
    model, states, *_ = prefilled
    shape = ModelShape.from_config(model.config, model.dtype)
    setup = make_setup(cold_dir, shape, context=400, form="sdpa over float16")
    cache = RivalCache(make_rival("full-memory", setup))
    keys, values = (part[0] for part in states[0])
    cache.fill(0, 0, keys, values)
    assert keys.dtype == torch.float32
    assert torch.equal(cache.rival.cache.keys[0, 0, :, :PROMPT], keys.half())
    assert torch.equal(cache.rival.cache.values[0, 0, :, :PROMPT], values.half())
