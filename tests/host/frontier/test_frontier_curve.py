# SPDX-License-Identifier: Apache-2.0
"""Where a system has a KL: between settings, at them, and never beyond them."""

from math import exp, log, sqrt

import pytest

from hillinfer_bench.frontier.curve import Curve, Point, StepCurve, falling

# KL falls by e² from setting to setting.
POINTS = [Point(0.1, exp(-2), 0.1), Point(0.2, exp(-4), 0.3), Point(0.4, exp(-6), 0.4)]

CASES = {
    "the first": (exp(-2), 0.1, 0.1),
    "one in the middle": (exp(-4), 0.2, 0.3),
    "the last": (exp(-6), 0.4, 0.4),
    "half way in log KL": (exp(-3), 0.15, 0.2),
    "a quarter": (exp(-4.5), 0.25, 0.325),
}


@pytest.mark.parametrize(("kl", "value", "share"), CASES.values(), ids=CASES)
def test_a_setting_between_two_is_on_the_line_over_log_kl(kl, value, share):
    # The order in which settings were measured says nothing.
    found = Curve(POINTS[::-1]).at(kl)
    assert (found.value, found.share) == (pytest.approx(value), pytest.approx(share))
    assert found.why == ""
    # The twin: the same points with one KL changed have another setting there.
    other = Curve([Point(one.value, one.kl**1.5, one.share) for one in POINTS]).at(kl)
    assert other.value != pytest.approx(value) or other.value is None


@pytest.mark.parametrize(
    ("kl", "told"),
    [
        (exp(-6.01), "not reached by any setting: 0.4 has a KL of 0.0025"),
        (exp(-1.99), "every setting is nearer to the full cache: 0.1 has a KL of 0.14"),
    ],
)
@pytest.mark.parametrize("kind", [Curve, StepCurve])
def test_nothing_is_said_beyond_the_settings(kind, kl, told):
    found = kind(POINTS).at(kl)
    assert (found.value, found.share, found.why) == (None, None, told)
    # The twin: just inside there is one.
    inside = min(max(kl, exp(-5.99)), exp(-2.01))
    assert kind(POINTS).at(inside).value is not None


def test_steps_have_nothing_between_them():
    found = StepCurve(POINTS).at(exp(-3))
    assert (found.value, found.share) == (0.2, 0.3)
    assert found.why == "the next setting there is, with a KL of 0.018"
    assert StepCurve(POINTS).at(exp(-4)).why == ""
    assert Curve(POINTS).at(exp(-3)).value == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 2, 1], [3, 2, 1]),
        ([3, 1, 2], [3, 1.5, 1.5]),
        ([1, 2, 3], [2, 2, 2]),
        ([5, 1, 3, 2, 0], [5, 2, 2, 2, 0]),
        ([4], [4]),
        ([2, 2], [2, 2]),
        # A pool that has grown may rise over the one before it.
        ([5, 3, 2, 7], [5, 4, 4, 4]),
    ],
)
def test_neighbours_that_rise_share_their_mean(values, expected):
    assert falling(values) == pytest.approx(expected)


def test_more_of_a_knob_is_never_worse():
    noisy = [Point(0.1, 0.02, 0.1), Point(0.2, 0.004, 0.2), Point(0.3, 0.009, 0.3)]
    curve = Curve(noisy)
    shared = sqrt(0.004 * 0.009)
    assert curve.falling_kls == pytest.approx([0.02, shared, shared])
    # At a KL that two settings share the smaller one does.
    assert curve.at(shared * (1 + 1e-12)).value == pytest.approx(0.2)
    assert curve.at(0.004).value is None


def test_a_kl_of_nothing_is_no_logarithm_of_nothing():
    curve = Curve([Point(0.5, 1e-3, 0.5), Point(1.0, 0.0, 1.0)])
    found = curve.at(1e-6)
    part = (log(1e-3) - log(1e-6)) / (log(1e-3) - log(1e-9))
    assert found.value == pytest.approx(0.5 + 0.5 * part)


def test_a_curve_needs_a_point():
    with pytest.raises(ValueError, match="needs a point"):
        Curve([])
