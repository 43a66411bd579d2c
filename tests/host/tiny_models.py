# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every supported family, and how tests attach to them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.opt.configuration_opt import OPTConfig
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

VOCABULARY = 61
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Query heads and KV heads: multi-head, grouped-query and multi-query attention.
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
# As many as real models have.
HEADS |= {"32 of 32": (32, 32), "32 of 8": (32, 8)}
# Chosen so that over `prompts([150])` and ten new tokens no two best logits lie closer than a tenth
# of the logits' spread in any type: greedy tokens then mean something in BF16 too. And no token
# after that prompt or `prompts([40])` is padding. The least such seeds of the weights below; of
# Llama with grouped queries the third, because rounding moves logits of the first ones by about
# the tolerance of FP32. Whoever changes how weights are drawn looks for seeds again.
_SPREAD_SEEDS = {
    ("llama", "mha"): 0,
    ("llama", "gqa"): 43,
    ("llama", "mqa"): 8,
    ("mistral", "mha"): 0,
    ("mistral", "gqa"): 43,
    ("mistral", "mqa"): 8,
    ("qwen2", "mha"): 29,
    ("qwen2", "gqa"): 2,
    ("qwen2", "mqa"): 27,
    ("qwen3", "mha"): 11,
    ("qwen3", "gqa"): 3,
    ("qwen3", "mqa"): 11,
    ("opt", "mha"): 7,
}


@dataclass(frozen=True)
class TinyModel:
    """One random model: small enough to run in milliseconds, with attention that matters."""

    family: str = "llama"
    heads: str = "gqa"
    dtype: torch.dtype = torch.float32
    head_dim: int = 8
    layers: int = 2
    seed: int | None = None
    # Of a token between layers; as wide as all query heads where None. Llamas alone may say it.
    hidden: int | None = None

    def __str__(self):
        return f"{self.family}-{self.heads}-{str(self.dtype).removeprefix('torch.')}"

    def config(self):
        query_heads, kv_heads = HEADS[self.heads]
        common = {
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden or query_heads * self.head_dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": query_heads,
            "max_position_embeddings": 4096,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": False,
        }
        if self.family == "opt":
            # OPT has a KV head per query head.
            return OPTConfig(
                **common,
                ffn_dim=2 * common["hidden_size"],
                word_embed_proj_dim=common["hidden_size"],
                dropout=0.0,
            )
        common |= {"num_key_value_heads": kv_heads, "intermediate_size": 2 * common["hidden_size"]}
        if self.family == "mistral":
            return MistralConfig(**common, head_dim=self.head_dim, sliding_window=None)
        if self.family == "qwen3":
            return Qwen3Config(**common, head_dim=self.head_dim)
        if self.family == "llama":
            return LlamaConfig(**common, head_dim=self.head_dim)
        return Qwen2Config(**common)

    def build(self):
        """Return a model of its own, with a config that no other model shares."""
        return copy.deepcopy(_built(self))


@cache
def _built(tiny: TinyModel):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(
            _SPREAD_SEEDS[tiny.family, tiny.heads] if tiny.seed is None else tiny.seed
        )
        model = AutoModelForCausalLM.from_config(tiny.config(), attn_implementation="sdpa")
        for name, weight in model.named_parameters():
            # Transformers initialises so small that attention is all but uniform and nearly every
            # token a tie; these keep activations near 1 and attention scores a few units apart.
            if weight.ndim == 2:
                gain = 1.7 if "q_proj" in name or "k_proj" in name else 1.0
                fan_in = 1 if "embed" in name else weight.shape[1]
                torch.nn.init.normal_(weight, std=gain * fan_in**-0.5)
            elif "bias" in name:
                torch.nn.init.normal_(weight, std=0.2)
            else:
                # Norms, which are all ones at first: whoever takes the wrong one must be seen.
                torch.nn.init.normal_(weight, mean=1.0, std=0.3)
    return model.to(tiny.dtype).eval()


def every_model(dtypes=DTYPES):
    """Return one model per family, head layout and type; OPT has no shared KV heads."""
    return [TinyModel(family, heads, dtype) for family, heads in _SPREAD_SEEDS for dtype in dtypes]


def prompts(lengths, seed=0):
    """Return left-padded ids and their mask, (batch, longest), all real ids above 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        if length:
            ids[row, -length:] = torch.randint(1, VOCABULARY, (length,), generator=generator)
            mask[row, -length:] = 1
    return ids, mask
