# SPDX-License-Identifier: Apache-2.0
"""Beyond 65,536 tokens, in a second window, a device scores as the host does."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from told_runtime import SCORE_BYTE, FailingDevice, GoldenLaunches

from hillinfer.devices.device import ResidentShadow
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import warn_of_loss
from hillinfer.devices.slots import LaunchDevice
from hillinfer.errors import HillInferWarning
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec

SEGMENT = 1024
TOKENS = 65 * SEGMENT + 77
SPEC = KernelSpec(4, 1, 1, key_mode=KeyMode.INT4, rule=Rule.WEIGHT_SUM, block_tokens=1000)
assert SPEC.segment_tokens == SEGMENT


@pytest.fixture(scope="module")
def host():
    return NativeScorer(SPEC, Scope.LAYER)


@pytest.fixture(scope="module")
def segments(host):
    keys = torch.randn(TOKENS, 1, 4, generator=torch.Generator().manual_seed(0)).half()
    made, statistics = [], None
    for base in range(0, TOKENS, SEGMENT):
        own = keys[base : base + SEGMENT]
        statistics = host.statistics(own, base, statistics)
        shadow = np.zeros((SPEC.segment_beats, 64), np.uint8)
        host.encode(own, statistics, shadow, 0)
        made.append(SegmentShadow(base, len(own), shadow, statistics))
    return made


def codes(scorer, segments):
    """Return the score code of every token."""
    query = torch.randn(1, 4, generator=torch.Generator().manual_seed(1))
    (tuples,) = scorer.tuples(query, 0.4, segments)
    # All of them came: each has the low bits of its position.
    np.testing.assert_array_equal(tuples & 0xFFFF, np.arange(TOKENS) & 0xFFFF)
    return tuples >> 16


@pytest.fixture(scope="module")
def expected(host, segments):
    return codes(host, segments)


def on_device(host, segments, device, wrong=None):
    """Return a scorer over a device, and the segments as the device holds them.

    Shadows in `wrong` are brought back in the place of those of these segments.
    """
    shadows = DeviceShadows(SPEC, device, 0.0, warn_of_loss)
    made = []
    for number, one in enumerate(segments):
        held = shadows.take(number)
        shadows.update(held, one.shadow, one.tokens)
        made.append(
            ResidentShadow(
                one.base_position, one.tokens, one.statistics, held.slot, held.tokens,
                held.probes, None, partial((wrong or {}).get, number, one.shadow),
            )
        )  # fmt: skip
    return DeviceScorer(host, shadows), made


def test_a_device_scores_every_window_as_the_host_does(host, segments, expected):
    scorer, held = on_device(host, segments, LaunchDevice(SPEC, GoldenLaunches(), 100))
    np.testing.assert_array_equal(codes(scorer, held), expected)
    assert scorer.shadows.scored_tokens == TOKENS // 64 * 64


# In the first window, at its end, and in the second one.
@pytest.mark.parametrize("parts", [30, 63, 64, 65])
def test_a_device_lost_in_the_middle_changes_no_score(host, segments, expected, parts):
    device = FailingDevice(LaunchDevice(SPEC, GoldenLaunches(), 100), "part", parts)
    scorer, held = on_device(host, segments, device)
    with pytest.warns(HillInferWarning, match="part failed; the host goes on"):
        np.testing.assert_array_equal(codes(scorer, held), expected)
    assert scorer.shadows.lost


def test_a_flipped_score_shows(host, segments, expected):
    device = LaunchDevice(SPEC, GoldenLaunches(SCORE_BYTE), 100)
    scorer, held = on_device(host, segments, device)
    assert (codes(scorer, held) != expected).sum() == 1


@pytest.mark.parametrize("number", [0, 64])
def test_a_flipped_code_shows_where_the_host_scores_for_a_lost_device(
    host, segments, expected, number
):
    device = FailingDevice(LaunchDevice(SPEC, GoldenLaunches(), 100), "part", number)
    wrong = segments[number].shadow.copy()
    # Not the newest tokens, from which the offsets of all come.
    wrong[SPEC.kv_heads : 4 * SPEC.group_beats] ^= 0x11
    scorer, held = on_device(host, segments, device, {number: wrong})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = codes(scorer, held)
    places = np.flatnonzero(found != expected)
    assert places.size
    assert set(places // SEGMENT) == {number}
