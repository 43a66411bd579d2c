# SPDX-License-Identifier: Apache-2.0
"""Which kernel specs can become hardware."""

from __future__ import annotations

from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import BEAT_BYTES, SLICE_CHANNELS, KernelSpec, ProductStyle

MAX_KV_HEADS = 40
MAX_GROUP_SIZE = 8
MIN_HEAD_DIM = 17
TUPLES_PER_BEAT = 16
# BRAM36 blocks that the buffers of one kernel may take: a quarter of a KU15P's 984. The shell and
# the other kernel need the rest.
MAX_BRAM36 = 246
_BRAM36_BITS = 36_864
# Each AXI adapter stores its outstanding bursts: 16 · 64 beats for keys and for scores, 4 · 64 for
# the rest.
_ADAPTER_BEATS = (16 + 16 + 4) * 64


class SpecError(ValueError):
    """A kernel spec that no kernel can be rendered from; the message says why."""


def check_hardware_spec(spec: KernelSpec) -> None:
    """Refuse a spec that the kernels do not support (contract, section 1; design, section 4).

    Parameters
    ----------
    spec
        Valid as a contract; the host's golden model may support more than the hardware.

    Raises
    ------
    SpecError
        With the reason.
    """
    if spec.head_dim < MIN_HEAD_DIM:
        raise SpecError(
            f"head_dim={spec.head_dim} is not supported: kernels take {MIN_HEAD_DIM}..256, since "
            f"fewer channels would be mostly padding"
        )
    if spec.kv_heads > MAX_KV_HEADS:
        raise SpecError(f"kv_heads={spec.kv_heads}: kernels have at most {MAX_KV_HEADS}")
    if spec.rule is Rule.WEIGHT_SUM and spec.group_size > MAX_GROUP_SIZE:
        raise SpecError(
            f"group_size={spec.group_size}: kernels score at most {MAX_GROUP_SIZE} query heads per "
            f"KV head"
        )
    if spec.block_tokens % TUPLES_PER_BEAT:
        raise SpecError(
            f"block_tokens={spec.block_tokens} is not a multiple of {TUPLES_PER_BEAT}: score "
            f"blocks on AXI are whole beats"
        )
    if spec.product_style is ProductStyle.MIXED:
        raise SpecError("product_style=mixed: kernels are built with dsp or lut products")
    blocks = on_chip_bram36(spec)
    if blocks > MAX_BRAM36:
        raise SpecError(
            f"the buffers need {blocks} BRAM36 blocks on chip, more than the {MAX_BRAM36} a kernel "
            f"may take"
        )


def on_chip_bram36(spec: KernelSpec) -> int:
    """Return the BRAM36 blocks that a kernel's buffers need, by their bits (an estimate).

    Counted: what the AXI adapters store, the double-buffered query codes, statistics and tiles,
    and the exponents of a group.
    """
    slices = spec.kv_heads * spec.padded_head_dim // SLICE_CHANNELS
    beat_bits = 8 * BEAT_BYTES
    bits = _ADAPTER_BEATS * beat_bits
    bits += 2 * 8 * spec.scored_heads * spec.padded_head_dim
    bits += 2 * slices * beat_bits
    if spec.key_mode is not KeyMode.FP16:
        bits += 2 * slices * beat_bits
    bits += 2 * spec.kv_heads * beat_bits
    return -(-bits // _BRAM36_BITS)
