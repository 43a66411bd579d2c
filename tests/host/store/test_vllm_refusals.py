# SPDX-License-Identifier: Apache-2.0
"""What vLLM's connector refuses at the start of an engine and of requests, each with its reason."""

from types import SimpleNamespace

import pytest

from hillinfer_vllm.refusals import checked, refusal_of
from hillinfer_vllm.shared_store import ConnectorError


# Named as vLLM's classes, whose names alone are looked at; it is not installed with the tests.
class FullAttentionSpec:
    sliding_window = None
    attention_chunk_size = None


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec:
    sliding_window = 4096


class ChunkedLocalAttentionSpec:
    attention_chunk_size = 8192


class MambaSpec:
    pass


class CrossAttentionSpec:
    pass


class _Windowed(FullAttentionSpec):
    sliding_window = 1024


_Windowed.__name__ = "FullAttentionSpec"


class _Pieces(FullAttentionSpec):
    attention_chunk_size = 8192


_Pieces.__name__ = "FullAttentionSpec"


class _Ahead(FullAttentionSpec):
    non_causal = True


_Ahead.__name__ = "FullAttentionSpec"


def engine(**changed):
    """An engine that is served, but for what is changed in it."""
    parts = {
        "kv_transfer_config": {"kv_load_failure_policy": "recompute", "kv_role": "kv_both"},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "nnodes": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
        },
        "cache_config": {"cache_dtype": "auto"},
        "scheduler_config": {"async_scheduling": False},
        "load_config": {"load_format": "auto"},
    }
    made = {
        name: SimpleNamespace(**{key: changed.pop(key, own) for key, own in values.items()})
        for name, values in parts.items()
    }
    return SimpleNamespace(**({"speculative_config": None, **made} | changed))


def blocks(*kinds, together=True):
    names = [f"model.layers.{number}.attn" for number in range(len(kinds))]
    one = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=kind())
        for name, kind in zip(names, kinds, strict=True)
    ]
    if together:
        one = [SimpleNamespace(layer_names=names, kv_cache_spec=kinds[0]())]
    return SimpleNamespace(kv_cache_groups=one)


PLAIN = blocks(FullAttentionSpec, FullAttentionSpec)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_an_engine_of_plain_attention_is_served(ranks):
    specs = checked(engine(tensor_parallel_size=ranks), PLAIN, "cpu")
    assert list(specs) == ["model.layers.0.attn", "model.layers.1.attn"]


ENGINES = {
    "a GPU": ({}, PLAIN, "cuda", "vLLM runs on cuda: .* run vLLM without the connector"),
    "errors of answers": (
        {"kv_load_failure_policy": "fail"},
        PLAIN,
        "cpu",
        "policy is 'fail': a damaged row would be an error of the answer; use recompute",
    ),
    "one role": ({"kv_role": "kv_producer"}, PLAIN, "cpu", "'kv_producer': .*use kv_both"),
    "pipeline parallel": (
        {"pipeline_parallel_size": 2},
        PLAIN,
        "cpu",
        "pipeline_parallel_size is 2: ranks have other layers.*use tensor_parallel_size",
    ),
    "several machines": ({"nnodes": 2}, PLAIN, "cpu", "nnodes is 2: .* with a router in front"),
    "context parallel prefill": (
        {"prefill_context_parallel_size": 2},
        PLAIN,
        "cpu",
        "prefill_context_parallel_size is 2: ranks have other tokens",
    ),
    "context parallel decode": (
        {"decode_context_parallel_size": 4},
        PLAIN,
        "cpu",
        "decode_context_parallel_size is 4: ranks have other tokens",
    ),
    "MLA": ({}, blocks(MLAAttentionSpec), "cpu", "MLAAttentionSpec in 1 groups.* no MLA"),
    "sliding windows": ({}, blocks(SlidingWindowSpec), "cpu", "SlidingWindowSpec in 1 groups"),
    "windows beside full layers": (
        {},
        blocks(FullAttentionSpec, SlidingWindowSpec, together=False),
        "cpu",
        "FullAttentionSpec, SlidingWindowSpec in 2 groups: .*no sliding windows",
    ),
    "pieces": ({}, blocks(ChunkedLocalAttentionSpec), "cpu", "ChunkedLocalAttentionSpec in 1"),
    "state spaces": (
        {},
        blocks(FullAttentionSpec, MambaSpec, together=False),
        "cpu",
        "FullAttentionSpec, MambaSpec in 2 groups: .*no state spaces",
    ),
    "an encoder": (
        {},
        blocks(FullAttentionSpec, CrossAttentionSpec, together=False),
        "cpu",
        "CrossAttentionSpec, FullAttentionSpec in 2 groups",
    ),
    "no layers": ({}, SimpleNamespace(kv_cache_groups=[]), "cpu", "KV of no kind in 0 groups"),
    "a window in full attention": ({}, blocks(_Windowed), "cpu", "attends to a window"),
    "pieces in full attention": ({}, blocks(_Pieces), "cpu", "to pieces or to later tokens"),
    "later tokens": ({}, blocks(_Ahead), "cpu", "to pieces or to later tokens"),
    "FP8": ({"cache_dtype": "fp8"}, PLAIN, "cpu", "kv_cache_dtype is 'fp8': .*use auto"),
    "speculation": (
        {"speculative_config": object()},
        PLAIN,
        "cpu",
        "speculative_config is set: failed loads would be told a step late",
    ),
    "steps ahead": ({"async_scheduling": True}, PLAIN, "cpu", "async_scheduling is on: .*off"),
    "random weights": ({"load_format": "dummy"}, PLAIN, "cpu", "load_format is 'dummy': rows of"),
    "weights that change": (
        {"weight_transfer_config": object()},
        PLAIN,
        "cpu",
        "weight_transfer_config is set: rows of one set",
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_refused_with_its_reason(name):
    changed, kv, device, said = ENGINES[name]
    with pytest.raises(ConnectorError, match=said):
        checked(engine(**changed), kv, device)


def request(**changed):
    plain = {"mm_features": [], "prompt_embeds": None, "lora_request": None, "pooling_params": None}
    return SimpleNamespace(**(plain | changed))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mm_features": [object()]}, "images or sound are part of it"),
        ({"prompt_embeds": object()}, "its prompt is of embeddings"),
        ({"pooling_params": object()}, "its tokens are pooled"),
    ],
)
def test_a_request_is_left_out_with_its_reason(changed, said):
    assert refusal_of(request()) is None
    assert said in refusal_of(request(**changed))
