# SPDX-License-Identifier: Apache-2.0
"""Packed projections: same numbers or close ones, taken off without a trace."""

import copy
import gc

import pytest
import torch
from tiny_models import FAMILIES, TinyModel, prompts
from torch._subclasses.fake_tensor import is_fake
from transformers import GPT2Config, GPT2LMHeadModel

import hillinfer
from hillinfer.errors import SettingsError, UnsupportedFeatureError
from hillinfer.projections.attachment import LayerGroup, ProjectionAttachment, SharedProduct
from hillinfer.projections.ways import PROJECTIONS, Prepacked, make_projections

# Largest error of logits beside their spread: rounding of sums, of FP16 weights, of INT8 weights.
CLOSE = {"fused": 1e-5, "rows": 1e-5, "prepacked": 1e-5, "fp16": 5e-3, "int8": 0.2}
CHANGING = tuple(CLOSE)
# Why a way is not there for a machine.
_NOT_HERE = "oneDNN cannot pack"
HEAD_DIM = 16
# Long enough for INT8 weights to be widened; single tokens take the other way.
IDS = prompts([70])[0]


def built(family="llama", dtype=torch.float32):
    heads = "mha" if family == "opt" else "gqa"
    return TinyModel(family, heads, dtype, head_dim=HEAD_DIM).build()


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits.float()


def attached(model, name):
    try:
        return ProjectionAttachment(model, make_projections(name))
    except UnsupportedFeatureError as error:
        if _NOT_HERE not in str(error):
            raise
        pytest.skip(f"{error}")


def error_share(found, wanted):
    return float((found - wanted).abs().max() / wanted.std())


def all_weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_close_in_prefill_and_in_decode(family, name):
    model = built(family)
    tokens = IDS[:, :1]
    wanted, wanted_one = logits(model), logits(model, tokens)
    with attached(model, name):
        found, found_one = logits(model), logits(model, tokens)
    assert error_share(found, wanted) < CLOSE[name]
    assert error_share(found_one, wanted_one) < CLOSE[name]
    # The twin: what rounds must show, or nothing was packed at all.
    if name in ("fp16", "int8"):
        assert not torch.equal(found, wanted)


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_weight_shows(family, name):
    # The twin of the test above: closeness must not come from logits that hardly vary.
    model = built(family)
    wanted = logits(model)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear) and layer.out_features != 61:
                layer.weight[0] *= 4
    with attached(model, name):
        assert error_share(logits(model), wanted) > CLOSE[name]


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_bfloat16_models(family, name):
    model = built(family, torch.bfloat16)
    wanted = logits(model)
    with attached(model, name):
        # bfloat16 itself rounds activations to 8 bits.
        assert error_share(logits(model), wanted) < 0.2


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_detached_model_is_as_before(family, name, tied):
    model = built(family)
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    weights, wanted = all_weights(model), logits(model)
    parameters = {key: id(one) for key, one in model.named_parameters(remove_duplicate=False)}
    own = {module: set(vars(module)) for module in model.modules()}
    attachment = attached(model, name)
    logits(model)
    attachment.detach()
    attachment.detach()
    assert {
        key: id(one) for key, one in model.named_parameters(remove_duplicate=False)
    } == parameters
    assert {module: set(vars(module)) for module in model.modules()} == own
    assert attachment.held_bytes == 0
    found = all_weights(model)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert torch.equal(logits(model), wanted)


def test_a_flipped_bit_in_packed_weights_shows_after_detaching():
    # The twin of the test above: what comes back was in the packed memory.
    model = built()
    weights = all_weights(model)
    with attached(model, "fused"), torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.view(torch.int32)[0, 0] ^= 1
    found = all_weights(model)
    assert [key for key in weights if not torch.equal(found[key], weights[key])] == [
        "model.layers.0.self_attn.k_proj.weight"
    ]


def bytes_alive():
    """Return the bytes of all tensors' storages, each once."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in tensors
        # Compiled models of other tests leave tensors without memory behind.
        if one.layout is torch.strided and one.device.type == "cpu" and not is_fake(one)
    }
    return sum(storages.values())


@pytest.mark.parametrize("name", ["fused", "rows", "prepacked"])
def test_weights_are_not_held_twice(name):
    model = built()
    layers = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    linear_bytes = sum(one.weight.nbytes for one in layers)
    before = bytes_alive()
    attachment = attached(model, name)
    grown = bytes_alive() - before
    if name in ("fused", "rows"):
        assert grown == attachment.held_bytes == 0
    else:
        # Packed weights are opaque and not among these: what was let go must be gone.
        assert grown == -linear_bytes
        assert attachment.held_bytes == 0
    attachment.detach()
    assert bytes_alive() == before


def test_held_bytes_are_codes_and_scales():
    model = built()
    layers = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    attachment = attached(model, "int8")
    assert attachment.held_bytes == sum(one.weight.numel() + 2 * one.out_features for one in layers)
    attachment.detach()
    with attached(model, "fp16") as attachment:
        assert attachment.held_bytes == sum(2 * one.weight.numel() for one in layers)


def test_a_tied_embedding_keeps_its_weight():
    model = built()
    model.lm_head.weight = model.get_input_embeddings().weight
    with attached(model, "prepacked") as attachment:
        assert model.get_input_embeddings().weight.device.type == "cpu"
        assert attachment.held_bytes == model.lm_head.weight.nbytes


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("order", ["projections first", "hillinfer first"])
def test_works_beside_hillinfer(name, order, tmp_path):
    model = built()
    wanted = logits(model)

    def put_on_hillinfer():
        return hillinfer.attach(model, alpha=1.0, dram_budget="64MiB", cold_dir=tmp_path)

    first, second = put_on_hillinfer, lambda: attached(model, name)
    if order == "projections first":
        first, second = second, first
    with first() as one, second() as two, torch.no_grad():
        cache = (one if hasattr(one, "new_cache") else two).new_cache()
        found = model(IDS[:, :-1], past_key_values=cache).logits
        last = model(IDS[:, -1:], past_key_values=cache).logits
        cache.close()
    found = torch.cat([found, last], 1).float()
    assert error_share(found, wanted) < max(CLOSE[name], 0.05)
    assert torch.equal(logits(model), wanted)


def test_later_layers_compute_for_themselves_on_another_tensor():
    model = built("qwen2")
    attention = model.model.layers[0].self_attn
    states, others = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    with torch.no_grad():
        wanted = attention.k_proj(others), attention.v_proj(states)
        with attached(model, "fused"):
            attention.q_proj(states)
            found = attention.k_proj(others), attention.v_proj(states)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, wanted, strict=True))


def test_one_product_serves_a_group_and_is_let_go():
    calls = []

    def packed(states):
        calls.append(states)
        return torch.cat([states, 2 * states, 3 * states], -1)

    product = SharedProduct(packed, [2, 2, 2])
    first, second, third = product.forwards()
    states = torch.ones(1, 2)
    assert [one(states)[0, 0].item() for one in (first, second, third)] == [1, 2, 3]
    assert len(calls) == 1
    # The same tensor again, but the parts are gone.
    assert second(states)[0, 0].item() == 2
    assert len(calls) == 2


def test_every_linear_layer_is_in_one_group():
    for family in FAMILIES:
        model = built(family)
        grouped = [layer for group in LayerGroup.of_model(model) for layer in group.layers]
        assert len(grouped) == len(set(grouped))
        assert set(grouped) == {one for one in model.modules() if isinstance(one, torch.nn.Linear)}


def test_unknown_names_are_refused():
    with pytest.raises(SettingsError, match="projections='int9' is unknown: choose one of steps"):
        make_projections("int9")


def test_other_families_are_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=61)).eval()
    with pytest.raises(UnsupportedFeatureError, match="opt models and this is gpt2"):
        ProjectionAttachment(model, make_projections("fused"))


class _Adapter(torch.nn.Linear):
    pass


def test_adapters_are_refused_and_nothing_is_left():
    model = built()
    last = model.model.layers[-1].mlp
    last.down_proj = _Adapter(last.down_proj.in_features, last.down_proj.out_features)
    with pytest.raises(UnsupportedFeatureError, match=r"1\.mlp\.down_proj is a _Adapter"):
        ProjectionAttachment(model, make_projections("int8"))
    assert not any("forward" in vars(one) for one in model.modules())


class _FailsLater(Prepacked):
    def __init__(self):
        self.left = 3

    def pack(self, weight, bias):
        self.left -= 1
        if not self.left:
            raise UnsupportedFeatureError("no more")
        return super().pack(weight, bias)


def test_failing_in_the_middle_leaves_the_model_as_it_was():
    model = built()
    weights, wanted = all_weights(model), logits(model)
    with pytest.raises(UnsupportedFeatureError, match="no more"):
        ProjectionAttachment(model, _FailsLater())
    found = all_weights(model)
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert torch.equal(logits(model), wanted)


def test_attaching_twice_is_refused():
    model = built()
    with (
        attached(model, "fused"),
        pytest.raises(UnsupportedFeatureError, match="forward function of its own already"),
    ):
        ProjectionAttachment(model, make_projections("int8"))


def test_training_gradients_and_fp16_models_are_refused():
    model = built()
    with pytest.raises(UnsupportedFeatureError, match=r"model\.eval\(\)"):
        ProjectionAttachment(model.train(), make_projections("fused"))
    model.eval()
    with (
        attached(model, "fused"),
        pytest.raises(UnsupportedFeatureError, match="no gradients"),
    ):
        model(IDS)
    with pytest.raises(UnsupportedFeatureError, match="float16: load the model in float32"):
        ProjectionAttachment(copy.deepcopy(model).half(), make_projections("fused"))


def test_weights_beyond_fp16_are_refused():
    model = built()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    with pytest.raises(UnsupportedFeatureError, match="100000 is beyond FP16's 65504"):
        ProjectionAttachment(model, make_projections("fp16"))


@pytest.mark.parametrize("inputs", [7, 24, 33])
def test_int8_inputs_of_any_width(inputs):
    # torch's kernel runs past the end of rows that are no whole vectors.
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, inputs, generator=generator)
    states = torch.randn(2, inputs, generator=generator)
    found = make_projections("int8").pack(weight, None)(states)
    assert error_share(found, states @ weight.T) < 0.05
