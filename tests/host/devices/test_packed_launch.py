# SPDX-License-Identifier: Apache-2.0
"""A packed launch holds what is read and nothing else, and scores the same."""

from dataclasses import replace

import numpy as np
import pytest
from launch_cases import random_launch

from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.descriptor import Descriptor
from hillinfer_model.golden_launch import run_score_launch
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.layout import shadow_beats
from hillinfer_pynq.open_pynq import packed_launch

SPEC = KernelSpec(64, 2, 1, key_mode=KeyMode.INT4, segment_tokens=512)
TOKENS = [512, 130, 1, 64]


def spread(launch, slots):
    """The launch with its shadows in slots of a larger memory, as a device holds them."""
    memory = np.full((8 * SPEC.segment_beats, 64), 0xA5, np.uint8)
    descriptors = []
    for index, slot in enumerate(slots):
        own = Descriptor.unpack(launch.segments[index : index + 1])
        beats, start = shadow_beats(own.tokens, SPEC), slot * SPEC.segment_beats
        memory[start : start + beats] = launch.shadow[own.shadow : own.shadow + beats]
        descriptors.append(replace(own, shadow=start).pack())
    return replace(launch, shadow=memory, segments=np.concatenate(descriptors))


@pytest.mark.parametrize("scope", list(Scope))
def test_scores_stay_and_what_no_segment_reads_goes(scope):
    launch = random_launch(SPEC, scope, TOKENS)
    own = spread(launch, [6, 0, 3, 7])
    packed = packed_launch(SPEC, own)
    assert packed.shadow.shape[0] == sum(shadow_beats(count, SPEC) for count in TOKENS)
    found, wanted = run_score_launch(SPEC, packed), run_score_launch(SPEC, launch)
    assert np.array_equal(found.output, wanted.output)
    assert np.array_equal(found.status, wanted.status)


def test_a_segment_scored_twice_is_there_twice():
    launch = spread(random_launch(SPEC, Scope.LAYER, [130, 130]), [2, 2])
    packed = packed_launch(SPEC, launch)
    half = shadow_beats(130, SPEC)
    assert np.array_equal(packed.shadow[:half], packed.shadow[half:])
    assert packed.shadow.shape[0] == 2 * half
