# SPDX-License-Identifier: Apache-2.0
"""Cycles that each stage of a kernel takes, the constants of the cycle model.

Taken from the SystemVerilog kernels in `hw/rtl`, whose pipeline depths they are; a kernel built by
another flow has other depths and the same structure.
"""

from __future__ import annotations

from hillinfer_model.beats import beat_count
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import BEAT_BYTES, SLICE_CHANNELS, KernelSpec

# From the write of ap_start to the first descriptor's address.
START = 5
# Behind a read command: the burst on the address channel, the data's FIFO.
READ_COMMAND = 3
READ_DATA = 3
# From a descriptor's arrival: check and record, then the blocks, the keys and the next descriptor
# are asked for.
BLOCK_COMMAND = 0
KEY_COMMAND = 1
NEXT_COMMAND = 3
EMPTY_NEXT_COMMAND = 1
# From a block's last word to the first key beat it is used for.
BLOCK_READY = 1
# The next descriptor is looked at when the last block's last beat is taken, before that beat has
# been taken apart.
LOAD_LEAD = 1
# A closed output burst on its way to the bus, and a status beat after its response.
WRITE_PATH = 3
STATUS_PATH = 5
# From the last response to ap_done.
END = 0
# Beats that the key FIFO holds, and bursts that may wait for the write bus: closed ones, and beats
# in the datapath's own FIFO, which are bursts of one where heads have arrays of their own.
KEY_FIFO_BEATS = 512
WAITING_BURSTS = 32 + 32
# Where in the memory's refresh period a launch starts: its arguments were written just before.
REFRESH_PHASE = 80

# Stages of the datapath.
DOT = 10
CAST = 16
SCORE = {Rule.WEIGHT_SUM: 12, Rule.RAW_SUM: 6}
SCORE_CODE = 5
TUPLES = 3
# From a row's last key beat to the shadow beats that hold its codes.
SHADOW_DEPTH = 30


def score_depth(spec: KernelSpec) -> int:
    """Return the cycles from a tile's last key beat to its tuples."""
    halves = 2 if spec.key_mode is KeyMode.FP16 else 1
    steps = spec.padded_head_dim // SLICE_CHANNELS // halves
    cast = CAST if spec.key_mode is KeyMode.FP16 else 0
    return cast + DOT + halves + steps + SCORE[spec.rule] + SCORE_CODE + TUPLES


def query_load(spec: KernelSpec) -> int:
    """Return the cycles in which a query block is taken apart.

    Addends and exponents leave a register one by one, which only holds up the next beat of the
    same kind. As many words of codes go at once as fall to different heads: up to a whole beat.
    """
    heads = spec.scored_heads
    per_kv_head = heads // spec.kv_heads
    at_once = 4 if per_kv_head >= 4 else 2 if per_kv_head >= 2 else 1
    words = heads * (spec.padded_head_dim // SLICE_CHANNELS)
    addends = 1 + (beat_count(4 * heads) - 1) * (BEAT_BYTES // 4)
    exponents = 1 + (beat_count(heads) - 1) * BEAT_BYTES
    return addends + exponents + -(-words // at_once)


def statistics_load(spec: KernelSpec) -> int:
    """Return the cycles in which a statistics block is read: a beat per cycle."""
    return spec.kv_heads * spec.padded_head_dim // SLICE_CHANNELS
