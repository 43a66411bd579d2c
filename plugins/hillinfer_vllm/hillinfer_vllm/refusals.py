# SPDX-License-Identifier: Apache-2.0
"""What the connector refuses, each with its reason: at vLLM's start, and of single requests.

Nothing of vLLM is imported here, so that tests need no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hillinfer_vllm.shared_store import ConnectorError

# What rows are taken of; its subclasses have names of their own, and other blocks.
_TAKEN = "FullAttentionSpec"


def checked(config: Any, kv: Any, device: str) -> dict[str, Any]:
    """Return the KV specification of each layer by its name.

    Parameters
    ----------
    config
        `VllmConfig` of the engine.
    kv
        Its `KVCacheConfig`.
    device
        What vLLM runs on, as its platform says: `cpu`, `cuda`.

    Raises
    ------
    ConnectorError
        Where rows cannot be stored for this engine; it says why and what to do.
    """
    groups = kv.kv_cache_groups
    specs = {name: group.kv_cache_spec for group in groups for name in group.layer_names}
    every = (
        *_of_transfer(config.kv_transfer_config, device),
        *_of_ranks(config.parallel_config),
        *_of_layers(len(groups), list(specs.values())),
        *_of_engine(config),
    )
    for is_wrong, said in every:
        if is_wrong:
            raise ConnectorError(said)
    return specs


def _of_transfer(transfer: Any, device: str) -> Iterator[tuple[bool, str]]:
    """Yield whether each thing is refused, and what is said of it."""
    yield (
        device != "cpu",
        f"vLLM runs on {device}: the store takes the KV blocks of its build for processors so far; "
        "run vLLM without the connector",
    )
    yield (
        transfer.kv_load_failure_policy != "recompute",
        f"kv_load_failure_policy is '{transfer.kv_load_failure_policy}': a damaged row would be an "
        "error of the answer; use recompute",
    )
    yield (
        transfer.kv_role != "kv_both",
        f"kv_role is '{transfer.kv_role}': the store is read and written; use kv_both",
    )


def _of_ranks(parallel: Any) -> Iterator[tuple[bool, str]]:
    yield (
        parallel.pipeline_parallel_size > 1,
        f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: ranks have other layers, "
        "and the store takes those of ranks that all have every layer; use tensor_parallel_size",
    )
    yield (
        parallel.nnodes > 1,
        f"nnodes is {parallel.nnodes}: a prompt is found where all ranks share the drives of one "
        "machine; run an engine for each machine, with a router in front",
    )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        count = getattr(parallel, name, 1)
        yield (
            count > 1,
            f"{name} is {count}: ranks have other tokens, and the store takes those of ranks that "
            "all have every token; use tensor_parallel_size",
        )


def _of_layers(groups: int, specs: list[Any]) -> Iterator[tuple[bool, str]]:
    kinds = ", ".join(sorted({type(spec).__name__ for spec in specs})) or "no kind"
    yield (
        groups != 1 or any(type(spec).__name__ != _TAKEN for spec in specs),
        f"the model has KV of {kinds} in {groups} groups: the store takes models whose layers all "
        "have full attention (no sliding windows, no MLA, no state spaces)",
    )
    yield (
        any(_looks_elsewhere(spec) for spec in specs),
        "a layer of the model attends to a window, to pieces or to later tokens: the store takes "
        "models whose tokens attend to all tokens before them",
    )


def _of_engine(config: Any) -> Iterator[tuple[bool, str]]:
    yield (
        config.cache_config.cache_dtype != "auto",
        f"kv_cache_dtype is '{config.cache_config.cache_dtype}': the store takes rows in the "
        "model's own type; use auto",
    )
    yield (
        config.speculative_config is not None,
        "speculative_config is set: failed loads would be told a step late; leave it out",
    )
    yield (
        bool(config.scheduler_config.async_scheduling),
        "async_scheduling is on: a step would be planned before it is known whether rows came; "
        "turn it off",
    )
    yield (
        str(config.load_config.load_format) == "dummy",
        "load_format is 'dummy': rows of random weights would be found as the model's",
    )
    yield (
        getattr(config, "weight_transfer_config", None) is not None,
        "weight_transfer_config is set: rows of one set of weights would be found for another",
    )


def _looks_elsewhere(spec: Any) -> bool:
    windows = (getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return bool(getattr(spec, "non_causal", False)) or any(one is not None for one in windows)


def refusal_of(request: Any) -> str | None:
    """Return why the rows of a request are neither loaded nor stored; None where they are."""
    if request.mm_features:
        return "images or sound are part of it, of which token numbers say nothing"
    if request.prompt_embeds is not None:
        return "its prompt is of embeddings"
    if request.pooling_params is not None:
        return "its tokens are pooled, and of those that are loaded there is nothing to pool"
    return None
