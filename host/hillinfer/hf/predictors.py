# SPDX-License-Identifier: Apache-2.0
"""Predicts the next layer's query, by family of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.models.llama.modeling_llama import rotate_half

from hillinfer.errors import SettingsError
from hillinfer.settings import QuerySource, Settings

# --- families of models ---

Rotary = tuple[torch.Tensor, torch.Tensor]


class QueryPredictor(ABC):
    """Makes a layer's query from hidden states that are not its own (HillInfer section 4.3).

    Layers change the hidden states by little each, so those that enter the layer before give
    nearly the query that the layer will make.
    """

    @abstractmethod
    def predict(self, layer: Any, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Return the query that a decoder layer would make of some hidden states.

        Parameters
        ----------
        layer
            A decoder layer of transformers.
        hidden
            (batch, tokens, hidden_size), before the layer's norm.
        rotary
            Cosines and sines of the tokens' positions, None in models without them.

        Returns
        -------
        (batch, query_heads, tokens, head_dim), as attention functions are given it.
        """

    @abstractmethod
    def scaling(self, layer: Any) -> float:
        """Return what the layer's attention multiplies inner products with."""


# --- Queries of OPT ---


class OptPredictor(QueryPredictor):
    """OPT scales its query itself, and its positions are in the hidden states already."""

    def predict(self, layer: Any, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Return the query; see `QueryPredictor`."""
        attention = layer.self_attn
        if layer.do_layer_norm_before:
            hidden = layer.self_attn_layer_norm(hidden)
        query: torch.Tensor = attention.q_proj(hidden) * attention.scaling
        return query.view(*hidden.shape[:-1], -1, attention.head_dim).transpose(1, 2)

    def scaling(self, layer: Any) -> float:
        """Return 1: the query is scaled already."""
        return 1.0


# --- Queries of models with rotary positions ---


class RotaryPredictor(QueryPredictor):
    """Llama, Mistral, Qwen2 and Qwen3: norm, projection, norm of each head where there is one."""

    def predict(self, layer: Any, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Return the query; see `QueryPredictor`."""
        assert rotary is not None
        attention = layer.self_attn
        query: torch.Tensor = attention.q_proj(layer.input_layernorm(hidden))
        query = query.view(*hidden.shape[:-1], -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        query = query.transpose(1, 2)
        # What `apply_rotary_pos_emb` does to a query, without a key to turn beside it.
        cosines, sines = rotary[0].unsqueeze(1), rotary[1].unsqueeze(1)
        turned: torch.Tensor = query * cosines + rotate_half(query) * sines
        return turned

    def scaling(self, layer: Any) -> float:
        """Return the layer's own factor."""
        return float(layer.self_attn.scaling)


# --- the table ---


@dataclass(frozen=True)
class Family:
    """What is known of one family of models.

    Parameters
    ----------
    predictor
        Makes a layer's query.
    default
        What `--query auto` means: `predicted` only where its selections were found to be as good
        on real weights, here (Llama, `make query`) or in print (OPT: InfiniGen, whose selections
        for OPT-6.7B to 30B rest on the same likeness of consecutive attention inputs).
    """

    predictor: QueryPredictor
    default: QuerySource


_FAMILIES = {
    "llama": Family(RotaryPredictor(), QuerySource.PREDICTED),
    "mistral": Family(RotaryPredictor(), QuerySource.TRUE),
    "qwen2": Family(RotaryPredictor(), QuerySource.TRUE),
    "qwen3": Family(RotaryPredictor(), QuerySource.TRUE),
    "opt": Family(OptPredictor(), QuerySource.PREDICTED),
}


def predictor_of(model_type: str, wanted: QuerySource) -> QueryPredictor | None:
    """Return what predicts the queries of a family, or None where true queries are to be used.

    Parameters
    ----------
    model_type
        As the model's config names it.
    wanted
        What the settings say.

    Raises
    ------
    SettingsError
        Where predicted queries are asked for and the family has no predictor.
    """
    family = _FAMILIES.get(model_type)
    if family is None:
        if wanted is QuerySource.PREDICTED:
            raise SettingsError(
                f"query=predicted: nothing predicts the queries of {model_type} models; choose "
                f"--query true, or one of the families {', '.join(_FAMILIES)}"
            )
        return None
    source = family.default if wanted is QuerySource.AUTO else wanted
    return family.predictor if source is QuerySource.PREDICTED else None


def with_named_query(settings: Settings, model_type: str) -> Settings:
    """Return settings that name the query; where it is the true one, nothing is read ahead.

    Parameters
    ----------
    settings
        Whose query may be `auto`.
    model_type
        As in `predictor_of`, which see for errors.
    """
    if predictor_of(model_type, settings.query) is None:
        # Blocks that rows land in ahead of their layer would be memory for nothing.
        return replace(settings, query=QuerySource.TRUE, prefetch_blocks=0)
    return replace(settings, query=QuerySource.PREDICTED)
