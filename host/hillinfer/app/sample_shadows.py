# SPDX-License-Identifier: Apache-2.0
"""Shadows to measure with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie.probe_shadow import ProbeShadow
from hillinfer.hie.shadow_layout import ShadowLayout
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec


def sample_shadows(spec: KernelSpec, count: int) -> list[SegmentShadow]:
    """Return full segments in memory of their own: real exponents, any codes.

    Parameters
    ----------
    spec
        Fixes sizes; the key mode has a shadow.
    count
        Segments.
    """
    generator = np.random.default_rng(0)
    one = _codes(spec, generator)
    shape = (spec.kv_heads, spec.head_dim)
    statistics = ChannelStatistics(
        generator.integers(-2, 3, shape, dtype=np.int8),
        generator.integers(-(2**16), 2**16, shape, dtype=np.int32),
    )
    memory = np.empty((count, *one.shape), dtype=np.uint8)
    memory[:] = one
    layout, length = ShadowLayout(spec), spec.segment_tokens
    segments = []
    for number, own in enumerate(memory):
        probes = ProbeShadow(layout, number)
        probes.take(own, 0, length)
        segments.append(SegmentShadow(number * length, length, own, statistics, probes))
    return segments


def _codes(spec: KernelSpec, generator: np.random.Generator) -> NDArray[np.uint8]:
    shadow = generator.integers(0, 256, (spec.segment_beats, BEAT_BYTES), dtype=np.uint8)
    groups = shadow.reshape(-1, spec.group_beats, BEAT_BYTES)
    exponents = groups[:, : spec.kv_heads]
    exponents[:] = generator.integers(8, 16, exponents.shape, dtype=np.uint8)
    return shadow
