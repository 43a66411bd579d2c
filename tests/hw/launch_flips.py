# SPDX-License-Identifier: Apache-2.0
"""Launches with one bit of their input flipped, where golden says that the bit matters."""

from dataclasses import replace

import numpy as np

from hillinfer_model.choices import KeyMode
from hillinfer_model.descriptor import Descriptor
from hillinfer_model.launch_error import LaunchError

BASE_POSITION_BYTE = 24


def flip_bit(launch, name, beat, byte, bit):
    """A launch with one bit of one buffer flipped."""
    buffer = getattr(launch, name).copy()
    buffer[beat, byte] ^= np.uint8(1 << bit)
    return replace(launch, **{name: buffer})


def visible_flip(spec, launch, run, same):
    """Flip one bit of keys, of a query or of statistics so that golden's result changes.

    Where no such bit is found, one of a base position or of the launch id changes it; None where
    the launch has no segments, so that nothing is written at all.
    """
    if launch.segments.shape[0] == 0:
        return None
    expected = run(spec, launch)
    candidates = [*_inputs(spec, launch), replace(launch, launch_id=launch.launch_id ^ 1)]
    return next(flip for flip in candidates if not same(run(spec, flip), expected))


def _inputs(spec, launch):
    """Yield launches with one bit flipped in what the first segment with tokens is made of."""
    for index in range(launch.segments.shape[0]):
        try:
            descriptor = Descriptor.unpack(launch.segments[index : index + 1])
        except LaunchError:
            return
        if descriptor.tokens:
            break
    else:
        return
    if hasattr(launch, "queries"):
        if spec.key_mode is KeyMode.FP16:
            yield flip_bit(launch, "shadow", descriptor.shadow, 1, 6)
            yield flip_bit(launch, "statistics", descriptor.statistics, 2, 5)
        else:
            yield flip_bit(launch, "shadow", descriptor.shadow + spec.kv_heads, 0, 1)
            yield flip_bit(launch, "shadow", descriptor.shadow, 0, 2)
        yield flip_bit(launch, "queries", descriptor.query, 1, 3)
    else:
        yield flip_bit(launch, "rows", descriptor.query, 1, 6)
        yield flip_bit(launch, "statistics", descriptor.statistics, 2, 5)
    # The lowest bit that leaves the position aligned.
    bit = spec.segment_tokens.bit_length() - 1
    yield flip_bit(launch, "segments", index, BASE_POSITION_BYTE + bit // 8, bit % 8)
