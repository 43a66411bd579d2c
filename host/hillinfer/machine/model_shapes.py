# SPDX-License-Identifier: Apache-2.0
"""Models of known shapes with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from hillinfer.model_shape import ModelShape

# Embeddings and the last projection are no part of what is compared, and made small.
_VOCABULARY = 256


@dataclass(frozen=True)
class BenchShape:
    """A model's shape, of which some layers are built.

    Parameters
    ----------
    family
        `llama` or `opt`, as transformers calls it.
    layers, all_layers
        Layers that are built, and those of the whole model.
    hidden, inner
        Channels between layers and inside the feed-forward part.
    query_heads, kv_heads
        Heads.
    head_dim
        Channels of a head.
    """

    family: str
    layers: int
    all_layers: int
    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def whole(self) -> bool:
        """Whether all layers are built."""
        return self.layers == self.all_layers

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that each decode step reads."""
        attention = self.hidden * self.head_dim * 2 * (self.query_heads + self.kv_heads)
        feed_forward = self.hidden * self.inner * (3 if self.family == "llama" else 2)
        return attention + feed_forward

    def config(self, positions: int) -> Any:
        """Return the config for a context of so many positions."""
        from transformers.models.llama.configuration_llama import LlamaConfig
        from transformers.models.opt.configuration_opt import OPTConfig

        common = {
            "vocab_size": _VOCABULARY,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "max_position_embeddings": positions,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": False,
        }
        if self.family == "opt":
            return OPTConfig(
                **common, ffn_dim=self.inner, word_embed_proj_dim=self.hidden, dropout=0.0
            )
        return LlamaConfig(
            **common,
            intermediate_size=self.inner,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
        )

    def kv_shape(self, positions: int, dtype: torch.dtype) -> ModelShape:
        """Return the shape of the KV cache."""
        return ModelShape.from_config(self.config(positions), dtype)

    def whole_kv_shape(self, positions: int, dtype: torch.dtype) -> ModelShape:
        """Return the shape of the KV cache of all layers of the whole model."""
        return replace(self, layers=self.all_layers).kv_shape(positions, dtype)

    def build(self, positions: int, dtype: torch.dtype) -> Any:
        """Return a model with random weights, in evaluation mode on the CPU."""
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                self.config(positions), attn_implementation="sdpa"
            )
        return model.to(dtype).eval()


PAPER_SHAPES = ("opt-6.7b", "llama-13b")
# The paper's models are built in part: as many layers as memory has room for beside every system's
# KV of 32k tokens. The first two never have a predicted query, the two others do.
SHAPES: Mapping[str, BenchShape] = MappingProxyType(
    {
        "tiny": BenchShape("llama", 2, 2, 64, 128, 4, 2, 16),
        "tiny-opt": BenchShape("opt", 2, 24, 64, 128, 4, 4, 16),
        "llama-3.2-1b": BenchShape("llama", 16, 16, 2048, 8192, 32, 8, 64),
        "llama-3.2-3b": BenchShape("llama", 28, 28, 3072, 8192, 24, 8, 128),
        "opt-6.7b": BenchShape("opt", 4, 32, 4096, 16384, 32, 32, 128),
        "llama-13b": BenchShape("llama", 4, 40, 5120, 13824, 40, 40, 128),
    }
)
