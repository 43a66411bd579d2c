# SPDX-License-Identifier: Apache-2.0
"""Which specs a kernel can be built for, and the memory it takes on the chip."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import SLICE_CHANNELS, KernelSpec, ProductStyle
from hillinfer_model.kernel_timing import KEY_FIFO_BEATS

LEAST_HEAD_DIM, MOST_HEAD_DIM = 64, 256
MOST_KV_HEADS = 40
MOST_GROUP_SIZE = 8
TUPLES_PER_BEAT = 16
BEAT_BITS = 512

# A block RAM of an UltraScale+ device as one port writes and the other reads.
BLOCK_RAM_BITS, BLOCK_RAM_WORDS = 72, 512
# Shallower memories are built from LUTs.
LEAST_BLOCK_RAM_WORDS = 64
KU15P_BLOCK_RAMS = 984
# Of one kernel: both kernels, the shell, the memory controller and the interconnect share the
# device, and a design that fills its block RAM columns does not meet timing.
KERNEL_BLOCK_RAMS = KU15P_BLOCK_RAMS // 10
_EXPONENT_GROUPS = 8
_WRITE_BEATS = 128
_BLOCK_READ_BEATS = 64


class HardwareSpecError(ValueError):
    """A spec that no kernel is built for; the message says why."""


@dataclass(frozen=True)
class OnChipMemory:
    """One memory of a kernel.

    Parameters
    ----------
    name
        What it holds.
    copies
        How many of it are read in the same cycle.
    bits, words
        Width and depth of one.
    """

    name: str
    copies: int
    bits: int
    words: int

    @property
    def block_rams(self) -> int:
        """36-kbit block RAMs; 0 where the memory is so shallow that LUTs hold it."""
        if self.words <= LEAST_BLOCK_RAM_WORDS:
            return 0
        deep = -(-self.words // BLOCK_RAM_WORDS)
        return self.copies * -(-self.bits // BLOCK_RAM_BITS) * deep


def on_chip_memories(spec: KernelSpec) -> list[OnChipMemory]:
    """Return the memories of the spec's `score_tokens`, estimated from its structure."""
    rows = spec.key_mode is KeyMode.FP16
    halves = 2 if rows else 1
    words = spec.kv_heads * spec.padded_head_dim // SLICE_CHANNELS
    heads = spec.scored_heads // spec.kv_heads
    memories = [
        OnChipMemory("key FIFO", 1, BEAT_BITS, KEY_FIFO_BEATS),
        OnChipMemory("block FIFO", 1, BEAT_BITS, _BLOCK_READ_BEATS),
        OnChipMemory("write FIFO", 1, BEAT_BITS, _WRITE_BEATS),
        # Two slots: a segment is loaded while another is computed.
        OnChipMemory("query codes", halves * heads, 8 * SLICE_CHANNELS, -(-2 * words // halves)),
        OnChipMemory("addends and exponents", heads, 40, 2 * spec.kv_heads),
    ]
    if rows:
        memories.append(OnChipMemory("statistics", halves, BEAT_BITS, -(-2 * words // halves)))
    else:
        depth = _EXPONENT_GROUPS * spec.kv_heads
        memories.append(OnChipMemory("exponents", 1, BEAT_BITS, depth))
    return memories


def block_rams(spec: KernelSpec) -> int:
    """Return the block RAMs of the spec's `score_tokens`, estimated."""
    return sum(memory.block_rams for memory in on_chip_memories(spec))


def check_hardware_spec(spec: KernelSpec, limit: int = KERNEL_BLOCK_RAMS) -> None:
    """Refuse a spec that no kernel is built for.

    Parameters
    ----------
    spec
        A sound spec of the contract; hardware takes fewer.
    limit
        Block RAMs that the kernel may use.

    Raises
    ------
    HardwareSpecError
        With the field, its value and the limit.
    """
    dim = spec.head_dim
    if dim % SLICE_CHANNELS or not LEAST_HEAD_DIM <= dim <= MOST_HEAD_DIM:
        raise HardwareSpecError(
            f"head_dim={dim} is not supported: kernels take multiples of {SLICE_CHANNELS} in "
            f"{LEAST_HEAD_DIM}..{MOST_HEAD_DIM}; pad the heads with zeros to "
            f"{spec.padded_head_dim}"
        )
    if spec.kv_heads > MOST_KV_HEADS:
        raise HardwareSpecError(f"kv_heads={spec.kv_heads}: kernels take up to {MOST_KV_HEADS}")
    if spec.group_size > MOST_GROUP_SIZE:
        raise HardwareSpecError(
            f"group_size={spec.group_size}: kernels take up to {MOST_GROUP_SIZE} query heads per "
            f"KV head"
        )
    if spec.block_tokens % TUPLES_PER_BEAT:
        raise HardwareSpecError(
            f"block_tokens={spec.block_tokens} is not a multiple of the {TUPLES_PER_BEAT} tuples "
            f"of a beat"
        )
    if spec.product_style is ProductStyle.MIXED:
        raise HardwareSpecError("product_style=mixed: kernels have dsp or lut products")
    needed = block_rams(spec)
    if needed > limit:
        parts = ", ".join(
            f"{memory.name} {memory.block_rams}"
            for memory in on_chip_memories(spec)
            if memory.block_rams
        )
        raise HardwareSpecError(
            f"too much on-chip memory: {needed} block RAMs ({parts}) of the {limit} that a kernel "
            f"may use of a KU15P's {KU15P_BLOCK_RAMS}; fewer KV heads, fewer query heads per KV "
            f"head or rule raw_sum need less"
        )
