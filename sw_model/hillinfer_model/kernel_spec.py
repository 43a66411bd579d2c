# SPDX-License-Identifier: Apache-2.0
"""`KernelSpec`: the shape and number formats that every execution of the contract is built from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from hillinfer_model.choices import KeyMode, Rule

CONTRACT_VERSION = 1
GROUP_TOKENS = 64
BEAT_BYTES = 64
SLICE_CHANNELS = 16
# What one pass over the keys may be scored by (contract, section 17).
MOST_QUERIES = 4


class ProductStyle(StrEnum):
    """What the hardware builds its multipliers from."""

    DSP = "dsp"
    LUT = "lut"
    MIXED = "mixed"


@dataclass(frozen=True)
class KernelSpec:
    """Shape and number formats of one scoring kernel (contract, section 12).

    Parameters
    ----------
    head_dim
        Channels of one head as the model has them, 1..256; padded with zeros to a multiple of 16
        and to at least 64.
    kv_heads
        KV heads of one layer, 1..64.
    group_size
        Query heads per KV head (G), 1..64.
    key_mode, rule, product_style
        See the enumerations.
    segment_tokens
        Positions that share channel statistics, a power of two in 512..65,536.
    block_tokens
        Tuples of one score block; a multiple of 16 on AXI devices, any positive number on a host.
    axi_bits
        Width of the memory ports; 512 only in contract version 1.
    contract_version
        Version of the scoring contract.
    queries
        Queries that one pass over the keys scores at most, 1..4 (contract, section 17).

    Raises
    ------
    ValueError
        Where a value lies outside the contract; the message names it.
    """

    head_dim: int
    kv_heads: int
    group_size: int
    key_mode: KeyMode = KeyMode.INT4
    rule: Rule = Rule.WEIGHT_SUM
    segment_tokens: int = 1024
    block_tokens: int = 1024
    axi_bits: int = 512
    product_style: ProductStyle = ProductStyle.DSP
    contract_version: int = CONTRACT_VERSION
    queries: int = 1

    def __post_init__(self) -> None:
        """Refuse what the contract does not define."""
        _within("head_dim", self.head_dim, 1, 256)
        _within("kv_heads", self.kv_heads, 1, 64)
        _within("group_size", self.group_size, 1, 64)
        _within("segment_tokens", self.segment_tokens, 512, 65_536)
        _within("block_tokens", self.block_tokens, 1, 65_536)
        _within("queries", self.queries, 1, MOST_QUERIES)
        if self.segment_tokens & (self.segment_tokens - 1):
            raise ValueError(f"segment_tokens={self.segment_tokens} is not a power of two")
        if self.axi_bits != 512:
            raise ValueError(f"axi_bits={self.axi_bits}: contract version 1 knows 512 only")
        if self.contract_version != CONTRACT_VERSION:
            raise ValueError(
                f"contract_version={self.contract_version}: this package implements "
                f"{CONTRACT_VERSION}"
            )

    @property
    def padded_head_dim(self) -> int:
        """Channels of one head as stored in a shadow: a multiple of 16, at least 64."""
        return max(64, -(-self.head_dim // SLICE_CHANNELS) * SLICE_CHANNELS)

    @property
    def query_heads(self) -> int:
        """Query heads of one layer, H = kv · G."""
        return self.kv_heads * self.group_size

    @property
    def scored_heads(self) -> int:
        """Rows of query codes the kernel multiplies: H, or kv where queries are summed first."""
        return self.kv_heads if self.rule is Rule.RAW_SUM else self.query_heads

    @property
    def tile_tokens(self) -> int:
        """Tokens whose codes share one beat per KV head and 16-channel slice: 4, 8 or 16."""
        return 8 * BEAT_BYTES // (SLICE_CHANNELS * self.key_mode.code_bits)

    @property
    def group_beats(self) -> int:
        """Beats of one group of 64 tokens: exponents, then tiles (contract, section 9)."""
        return self.kv_heads * (1 + self.padded_head_dim * self.key_mode.code_bits // 8)

    @property
    def segment_beats(self) -> int:
        """Beats of one full segment."""
        return self.group_beats * (self.segment_tokens // GROUP_TOKENS)

    @property
    def segment_bytes(self) -> int:
        """Bytes of one full segment of one layer."""
        return self.segment_beats * BEAT_BYTES

    def canonical_json(self) -> str:
        """Return the text whose SHA-256 identifies this spec in every artefact.

        One query is what version 1 has, and is not named.
        """
        fields = asdict(self)
        if self.queries == 1:
            del fields["queries"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    def digest(self) -> bytes:
        """Return the SHA-256 of the canonical JSON, 32 bytes."""
        return hashlib.sha256(self.canonical_json().encode()).digest()


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is outside {low}..{high}")
