# SPDX-License-Identifier: Apache-2.0
"""Models with random weights that the benchmark builds, whole or in part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from hillinfer.doctor import profile
from hillinfer.model_shape import ModelShape

# Embeddings and the last projection are no part of what is compared, and made small.
_VOCABULARY = 256


@dataclass(frozen=True)
class BenchShape(profile.ModelFigures):
    """A model's shape, of which some layers are built.

    Parameters
    ----------
    family, all_layers, hidden, inner, query_heads, kv_heads, head_dim
        As in `ModelFigures`.
    layers
        Layers that are built.
    """

    layers: int

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

    def build(self, positions: int, dtype: torch.dtype) -> Any:
        """Return a model with random weights, in evaluation mode on the CPU."""
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            # In the type from the start: in float32 first it would take three times the memory.
            model = AutoModelForCausalLM.from_config(
                self.config(positions), attn_implementation="sdpa", dtype=dtype
            )
        return model.eval()


PAPER_SHAPES = ("opt-6.7b", "llama-13b")
# The paper's models are built in part: as many layers as memory has room for beside every system's
# KV of 32k tokens. The first two never have a predicted query, the two others do.
_BUILT = {"tiny-opt": 2, "opt-6.7b": 4, "llama-13b": 4}
# SlimInfer's models. Qwen2 differs from Llama by biases, which cost nothing.
_SLIMMED = {
    "llama-3.1-8b": profile.ModelFigures("llama", 32, 4096, 14336, 32, 8, 128),
    "qwen2.5-7b": profile.ModelFigures("llama", 28, 3584, 18944, 28, 4, 128),
}
SHAPES: Mapping[str, BenchShape] = MappingProxyType(
    {
        name: BenchShape(**asdict(figures), layers=_BUILT.get(name, figures.all_layers))
        for name, figures in {**profile.SHAPES, **_SLIMMED}.items()
    }
)
