# SPDX-License-Identifier: Apache-2.0
"""The few numbers of a model that decide where its KV cache lies and how large it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

_STORED_ITEM_BYTES = 2
_ROW_ALIGNMENT = 64


class StoredType(StrEnum):
    """The 16-bit type of stored rows: the model's own, FP16 for fp32 models."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class ModelShape:
    """Shape of one model's KV cache.

    Parameters
    ----------
    layers, kv_heads, query_heads, head_dim
        As in the model's config; every layer has the same.
    stored_type
        Type of stored keys and values.
    max_positions
        Longest context that the model's position embedding allows.
    """

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    stored_type: StoredType
    max_positions: int

    @classmethod
    def from_config(cls, config: PretrainedConfig, dtype: torch.dtype) -> ModelShape:
        """Read the shape from a transformers config and the type the model computes in."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            query_heads=heads,
            head_dim=head_dim,
            stored_type=StoredType.BFLOAT16
            if str(dtype) == "torch.bfloat16"
            else StoredType.FLOAT16,
            max_positions=config.max_position_embeddings,
        )

    @property
    def group_size(self) -> int:
        """Query heads per KV head, G."""
        return self.query_heads // self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: K of all KV heads, then V, padded to 64 bytes."""
        unpadded = 2 * self.kv_heads * self.head_dim * _STORED_ITEM_BYTES
        return -(-unpadded // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @property
    def token_bytes(self) -> int:
        """Bytes of the rows of one token in all layers."""
        return self.layers * self.row_bytes
