# SPDX-License-Identifier: Apache-2.0
"""Attaching and detaching leave a model as it was; other caches do not notice."""

import copy

import pytest
import torch
from generation_runs import attached, bits, run
from tiny_models import FAMILIES, TinyModel, prompts
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import CoreDevice
from hillinfer.errors import CacheUseError, UnsupportedFeatureError, warn_of_loss
from hillinfer.scoring.native import NativeScorer


def forward_logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_detaching_restores_the_model(implementation, cold_dir):
    model = TinyModel().build()
    model.set_attn_implementation(implementation)
    ids, _ = prompts([40])
    before = forward_logits(model, ids)
    config = copy.deepcopy(model.config.to_dict())
    attributes = set(model.__dict__)

    hill = attached(model, cold_dir)
    assert model.config._attn_implementation == "hillinfer"
    hill.detach()
    hill.detach()

    assert torch.equal(forward_logits(model, ids), before)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == implementation
    assert set(model.__dict__) == attributes
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_generate_of_the_users_own_comes_back(cold_dir):
    model = TinyModel().build()
    own = model.generate
    model.generate = own
    with attached(model, cold_dir):
        assert model.generate is not own
    assert model.__dict__["generate"] is own


def test_an_error_inside_the_block_detaches_too(cold_dir):
    model = TinyModel().build()
    with pytest.raises(KeyError), attached(model, cold_dir):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_attaching_twice_is_refused_and_leaves_the_first_attachment(cold_dir):
    model = TinyModel().build()
    ids, _ = prompts([40])
    with attached(model, cold_dir) as hill:
        with pytest.raises(UnsupportedFeatureError, match="attached already: detach"):
            attached(model, cold_dir)
        cache = hill.new_cache()
        assert run(model, cache, ids, new_tokens=2).sequences.shape == (1, 42)
        cache.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ordinary_cache_computes_what_it_always_did(family, cold_dir):
    model = TinyModel(family, "mha" if family == "opt" else "gqa").build()
    ids, mask = prompts([70, 31])

    def outputs():
        made = []
        for given_ids, given_mask in ((ids, mask), (ids[:1], None)):
            for chunk in (None, 32):
                cache = DynamicCache(config=model.config)
                made.append(run(model, cache, given_ids, given_mask, prefill_chunk_size=chunk))
        return made

    before = outputs()
    with attached(model, cold_dir) as hill:
        # A cache of ours in between must leave nothing behind.
        cache = hill.new_cache()
        run(model, cache, ids, mask, new_tokens=3)
        cache.close()
        during = outputs()
    for one, other in zip(before, during, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert torch.equal(bits(one), bits(other))


def test_a_static_cache_computes_what_it_always_did(cold_dir):
    model = TinyModel().build()
    ids, mask = prompts([70, 31])

    def output():
        cache = StaticCache(config=model.config, max_cache_len=128)
        return run(model, cache, ids, mask, prefill_chunk_size=None, disable_compile=True)

    before = output()
    with attached(model, cold_dir):
        during = output()
    assert torch.equal(before.sequences, during.sequences)
    assert torch.equal(bits(before), bits(during))


def test_the_ordinary_cache_is_right_after_an_interrupted_forward(cold_dir):
    """Ctrl-C skips torch's forward hooks, so the next forward must not believe the last note."""
    model = TinyModel().build()
    ids, mask = prompts([70, 31])
    expected = run(model, DynamicCache(config=model.config), ids, mask)

    def interrupt(*_):
        raise KeyboardInterrupt

    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, cache, ids, mask)
        hook.remove()
        found = run(model, DynamicCache(config=model.config), ids, mask)
        cache.close()
    assert torch.equal(bits(found), bits(expected))


def test_models_that_share_a_config_keep_working(cold_dir):
    config = TinyModel().config()
    first, second = (LlamaForCausalLM(config).eval() for _ in range(2))
    ids, mask = prompts([70, 31])
    expected = run(second, DynamicCache(config=config), ids, mask)
    with attached(first, cold_dir):
        found = run(second, DynamicCache(config=config), ids, mask)
    assert torch.equal(bits(found), bits(expected))


def test_a_budget_in_percent_is_of_the_expected_length(cold_dir):
    model = TinyModel().build()
    with attached(model, cold_dir, dram_budget="4000%") as hill:
        cache = hill.new_cache(expected_tokens=4000)
        assert cache.statistics().dram_budget_bytes == 40 * 4000 * 2 * 64
        cache.close()


def test_a_device_is_told_the_expected_length(cold_dir):
    told = []

    class Told(DeviceShadows):
        def expect(self, segments):
            told.append(segments)

    def open_told(spec, scope, options, recorder):
        shadows = Told(spec, CoreDevice(spec), options.beta, warn_of_loss)
        return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)

    chosen = {"device": "core", "beta": 0.0, "dram_budget": "64MiB"}
    with attached(TinyModel().build(), cold_dir, {"core": open_told}, **chosen) as hill:
        for given in ({"expected_tokens": 4000}, {}):
            hill.new_cache(**given).close()
    # Of 1,024 tokens each.
    assert told == [4, 0]


def test_closed_caches_are_refused(cold_dir):
    model = TinyModel().build()
    ids, _ = prompts([40])
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        run(model, cache, ids)
        cache.close()
        cache.close()
        with pytest.raises(CacheUseError, match=r"closed.*new_cache"):
            run(model, cache, ids)
