# SPDX-License-Identifier: Apache-2.0
"""A forward pass that a cache was not told about, or that leaves it out, says why."""

import copy

import pytest
import torch
from generation_runs import attached, run
from tiny_models import TinyModel, prompts
from transformers import DynamicCache, LlamaForCausalLM

from hillinfer.errors import CacheUseError

TINY = TinyModel(layers=3)
IDS, _ = prompts([40])
# A cache by its tokens and its model, as errors name it.
NAMED = "<HillInferCache of 49 tokens, made for LlamaForCausalLM>"


@pytest.fixture
def attachment(cold_dir):
    with attached(TINY.build(), cold_dir) as hill:
        yield hill


@pytest.fixture
def cache(attachment):
    cache = attachment.new_cache()
    run(attachment.model, cache, IDS)
    yield cache
    cache.close()


def detached(hill, cache):
    hill.detach()
    return hill.model


def never_attached(hill, cache):
    return TINY.build()


def sharing_the_config(hill, cache):
    return LlamaForCausalLM(hill.model.config).eval()


def a_part(hill, cache):
    return hill.model.model


def its_forward(hill, cache):
    return hill.model.forward


def closed(hill, cache):
    cache.close()
    return hill.model


def closed_and_a_part(hill, cache):
    cache.close()
    return hill.model.model


REASONS = {
    detached: rf"^{NAMED} was not told.*taken off the model.* \(open caches of its engine: 1\): "
    r"hillinfer\.attach\(model\) again and go on with this cache, or close\(\) each",
    never_attached: r"never put on was called: hillinfer\.attach\(model\) first",
    sharing_the_config: r"shares the config.*copy\.deepcopy",
    a_part: r"call the model that was attached, not a part",
    its_forward: r"call the model that was attached itself, not its forward",
    closed: r"closed: make another with new_cache\(\)",
    closed_and_a_part: r"closed: make another with new_cache\(\)",
}


@torch.no_grad()
@pytest.mark.parametrize("called", REASONS)
def test_each_cause_is_named(called, attachment, cache):
    model = called(attachment, cache)
    length = cache.get_seq_length()
    with pytest.raises(CacheUseError, match=REASONS[called]):
        model(IDS[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == length


# What compiles takes seconds to import, so one process does it.
@pytest.mark.xdist_group("compiled")
@torch.no_grad()
def test_a_model_that_ran_compiled_before_it_was_attached(cold_dir):
    model = TINY.build()
    fast = torch.compile(model, backend="eager")
    fast(IDS, past_key_values=DynamicCache(config=model.config))
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        try:
            expected = model(IDS, past_key_values=hill.new_cache()).logits
            assert torch.equal(fast(IDS, past_key_values=cache).logits, expected)
        except CacheUseError as error:
            assert "compiled" in str(error)  # noqa: PT017
            assert "torch.compile(model) again" in str(error)  # noqa: PT017
        cache.close()


@torch.no_grad()
def test_a_cache_goes_on_after_its_model_is_attached_again(cold_dir):
    model = TINY.build()
    further = IDS[:, :1]
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        run(model, cache, IDS)
        expected = model(further, past_key_values=cache.fork()).logits
    with pytest.raises(CacheUseError, match="taken off"):
        model(further, past_key_values=cache)
    with attached(model, cold_dir):
        assert torch.equal(model(further, past_key_values=cache).logits, expected)
    cache.close()


@torch.no_grad()
def test_an_attachment_that_is_off_its_model_makes_no_caches(cold_dir, tmp_path):
    model = TINY.build()
    with attached(model, cold_dir) as hill, hill.new_cache() as cache:
        run(model, cache, IDS)
        cache.save_session(tmp_path / "session")
    message = r"taken off the LlamaForCausalLM.*attach\(model\) again, and make caches of that"
    for make in (hill.new_cache, lambda: hill.load_session(tmp_path / "session")):
        with pytest.raises(CacheUseError, match=message):
            make()
    with attached(model, cold_dir) as hill, hill.load_session(tmp_path / "session") as cache:
        assert model(IDS[:, :1], past_key_values=cache).logits.shape[1] == 1


# --- attention that leaves the cache out ---------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_another_attention_implementation(implementation, tokens, attachment, cache):
    model, ids = attachment.model, IDS[:, :tokens]
    length, expected = cache.get_seq_length(), model(ids, past_key_values=cache.fork()).logits
    model.set_attn_implementation(implementation)
    message = rf"set to '{implementation}'.*'hillinfer'\), or detach"
    with pytest.raises(CacheUseError, match=message):
        model(ids, past_key_values=cache)
    with pytest.raises(CacheUseError, match=message):
        run(model, attachment.new_cache(), IDS, new_tokens=1)
    assert cache.get_seq_length() == length
    model.set_attn_implementation("hillinfer")
    assert torch.equal(model(ids, past_key_values=cache).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 2])
def test_one_layer_that_attends_without_the_cache(layer, attachment, cache):
    """A pass is wrong with one such layer; it says which, and is forgotten."""
    model, ids = attachment.model, IDS[:, :1]
    length, expected = cache.get_seq_length(), model(ids, past_key_values=cache.fork()).logits
    attention = model.model.layers[layer].self_attn
    config = attention.config
    attention.config = copy.deepcopy(config)
    with pytest.raises(CacheUseError, match=rf"layer {layer} attended without the cache"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == length
    attention.config = config
    assert torch.equal(model(ids, past_key_values=cache).logits, expected)


@torch.no_grad()
def test_a_layer_that_is_skipped(attachment, cache):
    model, ids = attachment.model, IDS[:, :1]
    length, expected = cache.get_seq_length(), model(ids, past_key_values=cache.fork()).logits
    layers = model.model.layers
    model.model.layers = layers[:2]
    model.config.num_hidden_layers = 2
    with pytest.raises(CacheUseError, match=r"layer 2 brought the cache no keys.*ordinary cache"):
        model(ids, past_key_values=cache)
    model.model.layers, model.config.num_hidden_layers = layers, 3
    assert cache.get_seq_length() == length
    assert torch.equal(model(ids, past_key_values=cache).logits, expected)


# --- other models and prompts --------------------------------------------------------------


@torch.no_grad()
def test_a_cache_of_another_attached_model(attachment, cache, cold_dir):
    """Its rows would mean something else, where shapes are the same too."""
    with attached(TINY.build(), cold_dir) as other, cache.fork(), other.new_cache() as own:
        run(other.model, own, IDS)
        expected = other.model(IDS[:, :1], past_key_values=own.fork()).logits
        message = (
            rf"^{NAMED} \(open caches of its engine: 2\) was made for another model than the "
            r"LlamaForCausalLM that was called: .*new_cache\(\) of the attachment of this one"
        )
        for given in (cache, attachment.join([cache])):
            with pytest.raises(CacheUseError, match=message):
                other.model(IDS[:, :1], past_key_values=given)
        assert cache.get_seq_length() == 49
        assert torch.equal(other.model(IDS[:, :1], past_key_values=own).logits, expected)


@pytest.mark.parametrize(
    ("first", "then"),
    [("bfloat16", "float32"), ("bfloat16", "float16"), ("float32", "bfloat16")],
)
def test_a_model_that_computes_in_another_type_now(first, then, cold_dir):
    model = TINY.build().to(getattr(torch, first))
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        run(model, cache, IDS)
        model.to(getattr(torch, then))
        longer = torch.cat([IDS, IDS, IDS], 1)
        with pytest.raises(CacheUseError, match=rf"in {then} now: make another with new_cache"):
            model(longer[:, :1], past_key_values=cache)
        other = hill.new_cache()
        run(model, other, IDS)
        other.close()
        cache.close()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[:, :0], r"prompt is empty \(input_ids of shape \(1, 0\)\)"),
        (IDS[:0], r"prompt is empty \(input_ids of shape \(0, 40\)\)"),
        (IDS[0], r"tensor of \(batch, tokens\), not shape \(40,\).*return_tensors"),
        (IDS.tolist(), r"tensor of \(batch, tokens\), not list"),
    ],
    ids=["no tokens", "no rows", "one dimension", "a list"],
)
@pytest.mark.parametrize("use", ["generate", "__call__"])
def test_ids_that_are_none(ids, message, use, attachment, cache):
    call = getattr(attachment.model, use)
    for one in (cache, attachment.new_cache()):
        with pytest.raises(CacheUseError, match=message):
            call(ids, past_key_values=one)


def test_hillinfer_is_named_in_no_config_that_is_saved(attachment):
    assert attachment.model.config._attn_implementation == "hillinfer"
    assert copy.deepcopy(attachment.model.config)._attn_implementation == "sdpa"
