# SPDX-License-Identifier: Apache-2.0
"""What the adapter relies on inside transformers and torch.

A new version that changes one of these fails here, by name, and not in somebody's answer.
"""

import inspect

import pytest
import torch
from generation_runs import attached
from packaging.version import Version
from tiny_models import FAMILIES, TinyModel, prompts
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, __version__
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    create_causal_mask,
    sdpa_mask,
)

from hillinfer.hf import attention
from hillinfer.hf.attention import HillInferLayer
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.features import NAME, TRANSFORMERS_WINDOW


def parameters(function):
    return list(inspect.signature(function).parameters)


def public_names(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_installed_transformers_is_inside_the_window():
    low, high = (Version(".".join(map(str, bound))) for bound in TRANSFORMERS_WINDOW)
    assert low <= Version(__version__) < high


# --- caches --------------------------------------------------------------------------------


def test_layers_have_the_methods_that_are_implemented():
    assert CacheLayerMixin.__abstractmethods__ == {
        "lazy_initialization",
        "update",
        "get_mask_sizes",
        "get_seq_length",
        "get_max_length",
    }
    assert parameters(CacheLayerMixin.update) == [
        "self",
        "key_states",
        "value_states",
        "args",
        "kwargs",
    ]
    assert parameters(CacheLayerMixin.get_mask_sizes) == ["self", "query_length"]
    assert parameters(CacheLayerMixin.lazy_initialization) == ["self", "key_states", "value_states"]
    assert parameters(CacheLayerMixin.reorder_cache) == ["self", "beam_idx"]
    assert CacheLayerMixin._layer_type is None, "a layer type would register our class for all"


def test_every_public_member_of_a_layer_is_known():
    """A method that transformers adds may touch the tensors that our layers do not have."""
    inherited = public_names(CacheLayerMixin) - public_names(HillInferLayer)
    assert inherited == {"supports_early_init"}


def test_every_public_member_of_a_cache_is_known():
    overridden = {
        "activate_past_recording",
        "batch_repeat_interleave",
        "batch_select_indices",
        "batch_size",
        "crop",
        "reorder_cache",
        "reset",
    }
    ask_the_layers = {
        "early_initialization",
        "get_mask_sizes",
        "get_max_length",
        "get_query_offset",
        "get_seq_length",
        "is_compileable",
        "is_croppable",
        "is_dummy",
        "is_initialized",
        "is_linear",
        "is_recording_past",
        "is_sliding",
        "offload",
        "prefetch",
        "update",
    }
    of_other_layers = {
        "get_conv_state",
        "get_recurrent_state",
        "has_previous_state",
        "update_conv_state",
        "update_indexer",
        "update_recurrent_state",
    }
    known = overridden | ask_the_layers | of_other_layers
    assert public_names(Cache) == known
    assert overridden <= public_names(HillInferCache)


def test_a_cache_can_be_made_from_layers():
    assert "layers" in parameters(Cache.__init__)
    assert parameters(Cache.update)[:4] == ["self", "key_states", "value_states", "layer_idx"]
    assert parameters(Cache.crop) == ["self", "tokens_to_remove"]
    assert parameters(Cache.reorder_cache) == ["self", "beam_idx"]
    assert parameters(Cache.batch_repeat_interleave) == ["self", "repeats"]
    assert parameters(Cache.batch_select_indices) == ["self", "indices"]


def test_answers_that_generate_asks_a_cache_for(cold_dir):
    with attached(TinyModel().build(), cold_dir) as hill:
        cache = hill.new_cache()
        assert isinstance(cache, Cache)
        assert len(cache) == 2
        assert cache.get_seq_length() == 0
        assert cache.get_mask_sizes(7, 0) == (7, 0)
        assert cache.get_max_length() == -1
        assert cache.is_compileable is False
        assert cache.is_sliding == cache.is_linear == cache.is_dummy == [False, False]
        assert cache.is_croppable is False
        assert cache.batch_size == -1
        assert cache.is_initialized is False
        cache.close()


def test_layer_types_of_the_ordinary_cache_tell_attention_apart():
    assert {type(layer) for layer in DynamicCache(config=TinyModel().config()).layers} == {
        DynamicLayer
    }


# --- attention and masks -------------------------------------------------------------------


def test_functions_are_registered_by_name():
    assert parameters(AttentionInterface.register) == ["key", "value"]
    assert parameters(AttentionMaskInterface.register) == ["key", "value"]
    assert parameters(PreTrainedModel.set_attn_implementation)[:2] == [
        "self",
        "attn_implementation",
    ]


def test_what_sdpa_is_called_with():
    assert parameters(sdpa_attention_forward)[:5] == [
        "module",
        "query",
        "key",
        "value",
        "attention_mask",
    ]
    assert {"scaling", "dropout", "is_causal"} <= set(parameters(sdpa_attention_forward))
    assert {"attention_mask", "mask_function"} <= set(parameters(sdpa_mask))
    assert parameters(causal_mask_function) == ["batch_idx", "head_idx", "q_idx", "kv_idx"]
    assert {"config", "inputs_embeds", "attention_mask", "past_key_values"} <= set(
        parameters(create_causal_mask)
    )


@pytest.fixture
def calls():
    """Note every call of the registered functions while they go on working."""
    noted = {"attention": [], "mask": []}

    def spy(name, function):
        def noting(*args, **kwargs):
            noted[name].append((args, kwargs))
            return function(*args, **kwargs)

        return noting

    def install():
        AttentionInterface.register(NAME, spy("attention", attention.attention))
        AttentionMaskInterface.register(NAME, spy("mask", attention.mask))
        return noted

    yield install
    AttentionInterface.register(NAME, attention.attention)
    AttentionMaskInterface.register(NAME, attention.mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_how_a_model_calls_what_was_registered(family, calls, cold_dir):
    model = TinyModel(family, "mha").build()
    ids, mask = prompts([20, 12])
    longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    with attached(model, cold_dir) as hill, torch.no_grad():
        noted = calls()
        cache = hill.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
        model(ids[:, :1], attention_mask=longer, past_key_values=cache)
        cache.close()

    assert len(noted["mask"]) == 2
    for (_, kwargs), given in zip(noted["mask"], (mask, longer), strict=True):
        assert kwargs["mask_function"] is causal_mask_function
        assert torch.equal(kwargs["attention_mask"].bool(), given.bool())

    assert len(noted["attention"]) == 4
    for number, (args, kwargs) in enumerate(noted["attention"]):
        module, query, key, value, passed_mask = args
        layer = number % 2
        # The layer travels as an attribute of the key that `update` returned.
        assert key._hillinfer_layer.layer == module.layer_idx == layer
        tokens = 20 if number < 2 else 1
        assert query.shape == key.shape == value.shape == (2, 4, tokens, 8)
        # What the mask function returned comes through: two dimensions, never queries × keys.
        assert passed_mask.ndim == 2
        assert kwargs["scaling"] == (1.0 if family == "opt" else 8**-0.5)
        assert set(kwargs) <= {
            "scaling",
            "dropout",
            "position_ids",
            "use_cache",
            "sliding_window",
            "output_attentions",
            "output_hidden_states",
        }


def test_a_mask_of_queries_and_keys_is_never_made(calls, cold_dir):
    model = TinyModel().build()
    ids, mask = prompts([300, 100])
    with attached(model, cold_dir) as hill, torch.no_grad():
        noted = calls()
        cache = hill.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.close()
        # The ordinary cache still gets SDPA's mask.
        model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config))
    masks = [args[4] for args, _ in noted["attention"]]
    assert [one.numel() for one in masks[:2]] == [2 * 300] * 2
    assert [tuple(one.shape) for one in masks[2:]] == [(2, 1, 300, 300)] * 2


# --- torch ---------------------------------------------------------------------------------


def test_the_cpu_attention_kernel_has_the_schema_that_is_called():
    schema = str(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema)
    assert schema == (
        "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value,"
        " float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None)"
        " -> (Tensor output, Tensor logsumexp)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_attention_kernel_returns_the_natural_log_of_the_denominator(dtype):
    states = torch.randn(3, 1, 2, 5, 8).to(dtype)
    _, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states, scale=0.5)
    scores = states[0].float() @ states[1].float().transpose(-1, -2) * 0.5
    assert log_sum.dtype == torch.float32
    torch.testing.assert_close(log_sum, scores.logsumexp(-1), atol=1e-4, rtol=1e-4)


def test_hooks_that_are_always_called_get_none_from_a_forward_that_raised():
    noted = []

    class Raises(torch.nn.Module):
        def forward(self, raises):
            if raises:
                raise ZeroDivisionError
            return 1

    module = Raises()
    module.register_forward_hook(
        lambda module, args, kwargs, output: noted.append(output),
        with_kwargs=True,
        always_call=True,
    )
    module(False)
    with pytest.raises(ZeroDivisionError):
        module(True)
    assert noted == [1, None]
