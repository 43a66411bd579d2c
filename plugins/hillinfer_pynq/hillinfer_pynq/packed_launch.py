# SPDX-License-Identifier: Apache-2.0
"""A launch without the parts of the shadow buffer that it does not read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hillinfer_model.descriptor import Descriptor
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.layout import shadow_beats
from hillinfer_model.score_launch import ScoreLaunch


def packed_launch(spec: KernelSpec, launch: ScoreLaunch) -> ScoreLaunch:
    """Return a launch with the same scores whose shadows lie one behind the other.

    Parameters
    ----------
    spec
        Of the kernel; it has shadows, so its key mode is not `fp16`.
    launch
        With at least one segment, and sound descriptors.
    """
    descriptors, shadows, start = [], [], 0
    for index in range(launch.segments.shape[0]):
        one = Descriptor.unpack(launch.segments[index : index + 1])
        beats = shadow_beats(one.tokens, spec)
        shadows.append(launch.shadow[one.shadow : one.shadow + beats])
        descriptors.append(replace(one, shadow=start).pack())
        start += beats
    return replace(launch, segments=np.concatenate(descriptors), shadow=np.concatenate(shadows))
