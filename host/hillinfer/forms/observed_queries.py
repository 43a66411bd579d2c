# SPDX-License-Identifier: Apache-2.0
"""Queries of a document's own last tokens, which a store does not keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.models.llama.modeling_llama import rotate_half

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.forms.form import DocumentStates, opened_cache


@dataclass(frozen=True)
class LayerQueries:
    """Queries of one layer, of a document's last tokens.

    Parameters
    ----------
    plain
        Before they are turned by their positions, (query_heads, tokens, head_dim).
    turned
        As attention has them, of the same shape.
    """

    plain: torch.Tensor
    turned: torch.Tensor


def observed_queries(model: Any, states: DocumentStates, tokens: int) -> list[LayerQueries]:
    """Read a document's last tokens once more, and return the queries of each layer.

    Parameters
    ----------
    model
        With rotary positions: Llama, Mistral, Qwen2 or Qwen3.
    states
        Of the document.
    tokens
        How many of its last ones; all of it where it has no more.

    Raises
    ------
    UnsupportedFeatureError
        Where the model's queries are not made in that way.
    """
    before = max(0, states.tokens - tokens)
    layers = [
        (keys[:, :before].clone(), values[:, :before].clone()) for keys, values in states.layers
    ]
    cache = opened_cache(layers, before)
    ids = torch.tensor([states.ids[before:]], device=model.device)
    found: dict[int, LayerQueries] = {}
    with torch.no_grad(), _watched(model, found):
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [found[layer] for layer in range(len(states.layers))]


@contextmanager
def _watched(model: Any, found: dict[int, LayerQueries]) -> Iterator[None]:
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not hasattr(model.model, "rotary_emb"):
        raise UnsupportedFeatureError(
            f"{type(model).__name__} has no rotary positions: its queries are not observed; drop "
            "tokens by knorm or keydiff instead"
        )
    handles = [
        layer.self_attn.register_forward_pre_hook(partial(_note, found), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(
    found: dict[int, LayerQueries], attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    found[attention.layer_idx] = queries_of(attention, hidden, kwargs["position_embeddings"])


def queries_of(
    attention: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> LayerQueries:
    """Return the queries that an attention layer makes.

    Parameters
    ----------
    attention
        With `q_proj`, and `q_norm` where it has one.
    hidden
        What comes in, (1, tokens, hidden).
    rotary
        Cosines and sines of the tokens' positions, (1, tokens, head_dim) each.
    """
    query = attention.q_proj(hidden).view(*hidden.shape[:-1], -1, attention.head_dim)
    if hasattr(attention, "q_norm"):
        query = attention.q_norm(query)
    plain = query.transpose(1, 2)
    cosines, sines = (part.unsqueeze(1) for part in rotary)
    turned = plain * cosines + rotate_half(plain) * sines
    return LayerQueries(plain[0], turned[0])
