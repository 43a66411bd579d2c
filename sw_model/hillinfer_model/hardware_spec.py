# SPDX-License-Identifier: Apache-2.0
"""Checks whether a kernel can be built for a spec, and computes its memory on the chip."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import MOST_QUERIES, SLICE_CHANNELS, KernelSpec, ProductStyle
from hillinfer_model.kernel_timing import KEY_FIFO_BEATS

LEAST_HEAD_DIM, MOST_HEAD_DIM = 64, 256
MOST_KV_HEADS = 40
MOST_GROUP_SIZE = 8
TUPLES_PER_BEAT = 16
BEAT_BITS = 512

# A block RAM of an UltraScale+ device as one port writes and the other reads; half of one is as
# deep and half as wide. Written in lanes it keeps bytes without their ninth bit.
BLOCK_RAM_BITS, BLOCK_RAM_WORDS = 72, 512
LANED_BLOCK_RAM_BITS = 64
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
    lane_bits
        Width of the parts that are written by themselves; 0 for the whole word.
    """

    name: str
    copies: int
    bits: int
    words: int
    lane_bits: int = 0

    @property
    def block_rams(self) -> float:
        """36-kbit block RAMs, in halves."""
        laned = 0 < self.lane_bits <= LANED_BLOCK_RAM_BITS
        width = LANED_BLOCK_RAM_BITS if laned else BLOCK_RAM_BITS
        whole, rest = divmod(self.bits, width)
        columns = whole + (0 if rest == 0 else 0.5 if 2 * rest <= width else 1)
        return self.copies * columns * -(-self.words // BLOCK_RAM_WORDS)


def on_chip_memories(spec: KernelSpec, kernel: str = "score_tokens") -> list[OnChipMemory]:
    """Return the block RAMs' contents of a kernel, by the structure of the RTL.

    Parameters
    ----------
    spec
        The kernel's.
    kernel
        `score_tokens` or `make_shadow`.
    """
    # Addresses are bits: depths are powers of two.
    words = _power_of_two(spec.kv_heads * spec.padded_head_dim // SLICE_CHANNELS)
    heads = _power_of_two(max(spec.kv_heads, 2))
    memories = [
        # A read beat has its error bit beside it.
        OnChipMemory("key FIFO", 1, BEAT_BITS + 1, KEY_FIFO_BEATS),
        OnChipMemory("block FIFO", 1, BEAT_BITS + 1, _BLOCK_READ_BEATS),
        OnChipMemory("write FIFO", 1, BEAT_BITS, _WRITE_BEATS),
    ]
    # Two slots: a segment is loaded while another is computed. Rows are cast two slices at a time,
    # from two halves.
    statistics = OnChipMemory("statistics", 2, BEAT_BITS, words)
    if kernel == "make_shadow":
        lane = SLICE_CHANNELS * spec.key_mode.code_bits
        return [
            *memories,
            statistics,
            OnChipMemory("tiles", 2, BEAT_BITS, words, lane),
            OnChipMemory("exponents", 1, BEAT_BITS, 2 * heads, 8),
        ]
    queries = spec.scored_heads // spec.kv_heads
    code_bits = 8 * SLICE_CHANNELS
    # Every query of a pass has a datapath of its own behind the one reader of keys.
    own = [OnChipMemory("query codes", queries, code_bits, 2 * words)]
    if spec.key_mode is KeyMode.FP16:
        own = [OnChipMemory("query codes", 2 * queries, code_bits, words), statistics]
    else:
        own.append(OnChipMemory("exponents", 1, BEAT_BITS, _EXPONENT_GROUPS * heads))
    return [*memories, *(replace(one, copies=spec.queries * one.copies) for one in own)]


def block_rams(spec: KernelSpec, kernel: str = "score_tokens") -> float:
    """Return the block RAMs of a kernel, by the structure of the RTL; one of 18 kbit is a half."""
    return sum(memory.block_rams for memory in on_chip_memories(spec, kernel))


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
    for kernel in ("score_tokens", *(["make_shadow"] if spec.key_mode is not KeyMode.FP16 else [])):
        needed = block_rams(spec, kernel)
        if needed > limit:
            parts = ", ".join(
                f"{memory.name} {memory.block_rams:g}" for memory in on_chip_memories(spec, kernel)
            )
            raise HardwareSpecError(
                f"too much on-chip memory: {kernel} needs {needed:g} block RAMs ({parts}) of the "
                f"{limit} that a kernel may use of a KU15P's {KU15P_BLOCK_RAMS}; fewer KV heads, "
                f"fewer query heads per KV head or rule raw_sum need less"
            )


def most_queries(spec: KernelSpec) -> int:
    """Return how many queries a pass of a spec's kernel may score, 1 or more (section 17).

    Parameters
    ----------
    spec
        Of which a kernel of one query can be built.
    """
    for queries in range(MOST_QUERIES, 1, -1):
        try:
            check_hardware_spec(replace(spec, queries=queries))
        except HardwareSpecError:
            continue
        return queries
    return 1


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
