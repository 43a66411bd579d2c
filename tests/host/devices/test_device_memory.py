# SPDX-License-Identifier: Apache-2.0
"""What the plan says is enough with a device, is; and a full device is asked once."""

import warnings
from contextlib import closing
from dataclasses import replace

import pytest
from told_runtime import SHAPE, FailingDevice, Told, long_story, same, told_settings

from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import DEVICES, make_scorer, warn_of_loss
from hillinfer.devices.slots import LaunchDevice
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout, probe_bytes
from hillinfer.settings import HOST_DEVICES
from hillinfer.shadow.store import shadow_bytes

SETTINGS = {"block_rows": 64, "shadow": "int8"}
SPEC = kernel_spec(SHAPE, told_settings(**SETTINGS))


def plan_of(device, tokens, sequences):
    settings = told_settings(**SETTINGS, device=device)
    return BudgetPlan.with_whole_shadow(SHAPE, settings, tokens, sequences)


def streamed(tokens, sequences=1):
    return plan_of("csim", tokens, sequences).streamed(SPEC, SHAPE.layers, sequences)


def tell(cold_dir, plan, sequences=1, **given):
    limit = plan.shadow_limit(SPEC, SHAPE.layers, sequences) // shadow_bytes(SPEC)
    return closing(Told(cold_dir, limit=limit, budget=plan.required_bytes, **SETTINGS, **given))


def read_document(told):
    for _ in range(7):
        told.feed(1000)
    told.feed(1)


def test_the_shadow_of_a_long_prompt_does_not_pile_up_in_dram(cold_dir):
    plan = streamed(7_001)
    with tell(cold_dir, plan) as told:
        read_document(told)
        statistics = told.runtime.statistics()
    assert statistics.device_scored_tokens == 2 * (7_001 // 64 * 64)
    assert statistics.dram_peak_bytes <= plan.required_bytes
    assert statistics.shadow_bytes <= plan.device.probe_bytes + 4 * shadow_bytes(SPEC)
    assert statistics.shadow_write_bytes == 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What comes out with the plain drive and more DRAM than is needed."""
    cold_dir = tmp_path_factory.mktemp("cold")
    with closing(Told(cold_dir, slots=None, budget=64 << 20, **SETTINGS)) as told:
        return long_story(told)


# `long_story` reads and decodes to 3,077 tokens, rewinds and cuts, in two sequences.
STORY = (3_200, 2)


@pytest.mark.parametrize(
    ("whole", "slots"),
    # Where the whole shadow has room here, a device's room moves less.
    [*(("streamed", slots) for slots in (1, 2, 6, 100)), ("whole", 2), ("whole", 100)],
)
def test_the_least_budget_is_enough_whatever_room_a_device_has(cold_dir, plain, slots, whole):
    plan = {"whole": plan_of("csim", *STORY), "streamed": streamed(*STORY)}[whole]
    with tell(cold_dir, plan, STORY[1], slots=slots) as told:
        assert same(long_story(told), plain)
        statistics = told.runtime.statistics()
    assert statistics.dram_peak_bytes <= plan.required_bytes
    assert statistics.shadow_bytes <= plan.shadow_bytes + plan.device.probe_bytes
    assert statistics.other_bytes <= plan.other_bytes


@pytest.mark.parametrize(("kind", "number"), [("write", 5), ("score", 3), ("part", 9), ("read", 0)])
def test_it_is_enough_when_the_device_is_lost(cold_dir, kind, number):
    plan = streamed(*STORY)
    with (
        tell(
            cold_dir, plan, STORY[1], wrap=lambda device: FailingDevice(device, kind, number)
        ) as told,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        long_story(told)
        assert told.shadows.lost
        assert told.runtime.statistics().dram_peak_bytes <= plan.required_bytes


def test_the_plan_counts_the_probes_of_every_segment_and_three_shadows():
    host, device = plan_of("nvme", *STORY), plan_of("csim", *STORY)
    layout = ShadowLayout(SPEC)
    sizes = [ProbeShadow(layout, number).shadow.nbytes for number in range(4)]
    assert [probe_bytes(SPEC, number) for number in range(4)] == sizes
    # Three sinks more than a group holds.
    assert sizes == [2 * sizes[1], *sizes[1:2] * 3]
    assert device.device.probe_bytes == 2 * 2 * sum(sizes)
    assert device.required_bytes - host.required_bytes == (
        2 * 2 * sum(sizes) + 3 * shadow_bytes(SPEC)
    )
    assert plan_of("golden", *STORY) == host


def test_what_is_no_device_is_told_by_name():
    assert set(DEVICES) >= HOST_DEVICES
    # A kernel is built for it.
    spec = replace(SPEC, head_dim=64)
    for name in HOST_DEVICES | {"csim"}:
        scorer = make_scorer(name, spec, told_settings().scope)
        assert (scorer.on_device is not None) == (name not in HOST_DEVICES)


class CountedRoom(LaunchDevice):
    """A device shared with others, that says how often it was asked for room."""

    def __init__(self, room):
        super().__init__(SPEC, None, 100)
        self.room = room
        self.asked = 0

    def has_room(self, slot):
        self.asked += 1
        return slot < self.room


def test_a_full_device_is_asked_again_once_something_was_given_back():
    device = CountedRoom(18)
    shadows = DeviceShadows(SPEC, device, 0.0, warn_of_loss)
    held = [shadows.take(0), shadows.take(1)]
    assert all(held)
    assert shadows.take(2) is None
    before = device.asked
    assert [shadows.take(number) for number in range(2, 9)] == [None] * 7
    assert device.asked == before
    shadows.give(held.pop())
    assert shadows.take(2).slot == 17
    assert shadows.take(3) is None
    assert device.asked == before + 1
