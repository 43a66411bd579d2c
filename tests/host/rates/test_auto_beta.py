# SPDX-License-Identifier: Apache-2.0
"""Segments are shared by rates, once each, and what was selected moves those to come."""

import math

import numpy as np
import pytest

from hillinfer.devices.device_shadows import DeviceShadows, GivenBeta
from hillinfer.devices.opening import CoreDevice
from hillinfer.rates.kept_rates import Rates
from hillinfer.rates.latency import AutoBeta, ParallelScorers, ScoresThenRows
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import KernelSpec

SPEC = KernelSpec(16, 1, 1, KeyMode.INT4)


def auto(f_c, f_s, b_c=math.inf, b_s=math.inf, most=10**6):
    return AutoBeta(ParallelScorers(Rates(f_c, f_s, b_c, b_s)), 1024, 0.1, most)


@pytest.fixture
def shadows():
    device = CoreDevice(SPEC)
    yield DeviceShadows(SPEC, device, None, lambda error: None)
    device.close()


def on_host(shadows, count):
    return [not shadows.wants(number) for number in range(count)]


@pytest.mark.parametrize(("f_c", "f_s", "hosts"), [(1, 1, 10), (3, 1, 15), (1, 3, 5), (1, 0, 20)])
def test_every_prefix_is_shared_by_the_rates(shadows, f_c, f_s, hosts):
    shadows.share_by(auto(f_c, f_s))
    placed = on_host(shadows, 20)
    assert sum(placed) == hosts
    for count in range(1, 21):
        assert abs(sum(placed[:count]) - count * f_c / (f_c + f_s)) <= 1


def dear(most=10**6):
    """Equal sides, whose sharing pays from 16 segments on."""
    rates = Rates(1.024e6, 1.024e6, math.inf, math.inf, sharing=0.0079)
    return AutoBeta(ScoresThenRows(rates), 1024, 0.1, most)


def test_what_is_expected_is_shared_as_a_whole(shadows):
    shadows.share_by(dear())
    shadows.expect(40)
    placed = on_host(shadows, 40)
    assert sum(placed) == 20
    for count in range(1, 41):
        assert abs(sum(placed[:count]) - count / 2) <= 1
    # Less than that changes nothing, and more goes on from there.
    shadows.expect(10)
    assert on_host(shadows, 40) == placed
    shadows.expect(50)
    assert on_host(shadows, 40) == placed
    assert sum(on_host(shadows, 50)) == 25


def test_what_nobody_told_of_is_the_host_s_until_sharing_pays(shadows):
    """The twin: without a length, the first segments are placed as if none came after them."""
    shadows.share_by(dear())
    assert on_host(shadows, 40) == [True] * 15 + [False] * 16 + on_host(shadows, 40)[31:]
    assert sum(on_host(shadows, 40)) == 20


def test_a_short_one_that_is_expected_is_the_host_s(shadows):
    shadows.share_by(dear())
    shadows.expect(15)
    assert on_host(shadows, 15) == [True] * 15
    # A long one that comes then gets what balances the whole.
    shadows.expect(64)
    assert sum(on_host(shadows, 64)) == 32


def test_memory_bounds_what_the_host_gets(shadows):
    shadows.share_by(auto(1, 0, most=3))
    assert sum(on_host(shadows, 20)) == 3


def test_what_is_placed_stays_and_what_comes_is_corrected(shadows):
    share = auto(1e6, 1e6, b_c=1e6, b_s=1e6)
    shadows.share_by(share)
    before = on_host(shadows, 10)
    assert sum(before) == 5
    # All that is selected is the host's: its rows take so long that the device gets more.
    shadows.note_selected(1000, 1000, 1000, 0)
    after = on_host(shadows, 40)
    assert after[:10] == before
    assert sum(after) == round(40 / 3)
    # And asking again changes nothing.
    assert on_host(shadows, 40) == after


def test_none_gives_the_device_everything(shadows):
    assert on_host(shadows, 8) == [False] * 8


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 2.5, 1e9])
def test_a_given_beta_is_as_it_was(beta):
    device = CoreDevice(SPEC)
    found = on_host(DeviceShadows(SPEC, device, beta, lambda error: None), 50)
    device.close()
    counts = [int(n * (beta / (1 + beta)) + 0.5) for n in range(51)]
    assert found == [bool(step) for step in np.diff(counts)]
    GivenBeta(beta).note(1, 1, 1, 1)
