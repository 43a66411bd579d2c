# SPDX-License-Identifier: Apache-2.0
"""Sequences that share segments on a device are scored together, and choose as they do alone."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from told_runtime import FailingDevice, Forgetful, GoldenLaunches, LookedAfter

from hillinfer.devices.device import DeviceSegment, ResidentShadow
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import CoreDevice
from hillinfer.devices.slots import LaunchDevice, SmallestKernels
from hillinfer.devices.started_scoring import AskedScoring, shared_passes
from hillinfer.errors import warn_of_loss
from hillinfer.rates.profiling import sample_shadows
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import Wanted
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import KernelSpec

SPEC = KernelSpec(64, 2, 2, KeyMode.INT4)
WANTED = Wanted(200, 4, 60)


def golden_device(queries=4):
    return LaunchDevice(replace(SPEC, queries=queries), GoldenLaunches(), 12)


DEVICES = {"golden": golden_device, "core": lambda: CoreDevice(SPEC)}


class Shared:
    """Four sequences over a device: three begin with the same two segments, one has its own."""

    def __init__(self, device, scope):
        self.shadows = DeviceShadows(SPEC, device, 0.0, warn_of_loss)
        self.scorer = DeviceScorer(NativeScorer(SPEC, scope), self.shadows)
        own = list(sample_shadows(SPEC, 4))
        chance = np.random.default_rng(3)
        for one in own:
            # Each another's codes, so that sets are of all of them.
            exponents = one.shadow[SPEC.kv_heads :: SPEC.group_beats]
            exponents[:] = chance.integers(0, 256, exponents.shape, dtype=np.uint8)
            one.probe_copy.take(one.shadow, 0, 1024)
        on_device = [self._resident(one) for one in own]
        # With tails of the host's, of a device's, with none, and a sequence of its own segments.
        self.sequences = [
            [*on_device[:2], own[2]],
            [*on_device[:3], own[3]],
            on_device[:2],
            [self._resident(own[0]), own[1]],
        ]
        self.queries = torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(1)).unbind()

    def _resident(self, one):
        place = self.shadows.room(0)
        self.shadows.update(place, one.shadow, 1024)
        return ResidentShadow(
            one.base_position, 1024, one.statistics, place.slot, 1024, place.probes, one.shadow,
            None,
        )  # fmt: skip

    def close(self):
        self.shadows.close()

    def asked(self):
        return [
            AskedScoring(query, 0.05, segments, 0)
            for query, segments in zip(self.queries, self.sequences, strict=True)
        ]

    def chosen(self):
        return [
            self.scorer.choose(query, 0.05, segments, 0, [WANTED])[0]
            for query, segments in zip(self.queries, self.sequences, strict=True)
        ]


def one_launch(shared):
    """Query blocks and segments of a launch of one segment."""
    segments = shared.sequences[1]
    started = shared.scorer.start(shared.queries[1], 0.05, segments)
    first = segments[0]
    return started.query_blocks([0]), [DeviceSegment(first.slot, first.base_position, 1024)]


def together(shared):
    shared.scorer.begin_together(shared.asked())
    return shared.chosen()


def same(one, other):
    return all(
        len(a) == len(b) and all(map(np.array_equal, a, b)) for a, b in zip(one, other, strict=True)
    )


class Noted(GoldenLaunches):
    """Keeps how many queries the kernels have that it is asked to run."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def score(self, spec, launch):
        self.kernels.append(spec.queries)
        return super().score(spec, launch)


def test_launches_of_one_query_run_in_a_kernel_of_one():
    noted = Noted()
    device = LaunchDevice(replace(SPEC, queries=4), SmallestKernels(noted), 12)
    with closing(Shared(golden_device(), Scope.LAYER)) as shared:
        expected = together(shared)
    with closing(Shared(device, Scope.LAYER)) as shared:
        assert same(together(shared), expected)
    # Three sequences share a pass; the rest is scored for each by itself.
    assert noted.kernels == [4, *([1] * (len(noted.kernels) - 1))]
    assert len(noted.kernels) > 1


class Forgets(LookedAfter):
    """Drops what is left of a launch when it is given another, as a card does, and counts it."""

    lost = 0

    def __init__(self, device):
        super().__init__(device)
        self._unread = []

    def score(self, *given):
        self.lost += len(self._unread)
        self._unread = own = list(self.device.score(*given))

        def parts():
            while own:
                yield own.pop(0)

        return parts()


def test_passes_are_of_what_lies_once_on_a_device():
    with closing(Shared(golden_device(), Scope.LAYER)) as shared:
        (found,) = shared_passes(shared.asked(), 4)
        assert found.askers == [0, 1, 2]
        assert found.numbers == [[0, 1]] * 3
        first = shared.sequences[0][0]
        assert found.segments[0] == DeviceSegment(first.slot, 0, 1024)
        # Two at a time: the third is left alone. Of one query nothing is shared.
        assert [one.askers for one in shared_passes(shared.asked(), 2)] == [[0, 1]]
        assert not [*shared_passes(shared.asked(), 1)]


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("name", DEVICES)
def test_what_is_begun_together_is_chosen_as_alone(name, scope):
    with closing(Shared(golden_device(1), scope)) as alone:
        expected = alone.chosen()
    with closing(Shared(DEVICES[name](), scope)) as shared:
        assert same(shared.chosen(), expected)
        apart = shared.shadows.launches
        shared.scorer.begin_together(shared.asked())
        assert same(shared.chosen(), expected)
        assert shared.shadows.shared_launches == 1
        # One pass for three sequences; the second has one more segment there, the fourth its own.
        assert (apart, shared.shadows.launches - apart) == (4, 3)
        # Each query counts: six segments in the pass.
        assert shared.shadows.scored_segments == 2 * (2 + 3 + 2 + 1)
        # The twin: another query in the place of one, and what was begun is not taken for it.
        shared.scorer.begin_together(shared.asked())
        shared.queries = (shared.queries[0], -shared.queries[1], *shared.queries[2:])
        found = shared.chosen()
        assert same([found[i] for i in (0, 2, 3)], [expected[i] for i in (0, 2, 3)])
        assert not same(found[1:2], expected[1:2])


def test_a_launch_in_between_takes_nothing_from_a_pass():
    """Whoever is chosen for first, with segments of its own on the device."""
    with closing(Shared(golden_device(1), Scope.LAYER)) as alone:
        expected = alone.chosen()
    device = Forgets(golden_device())
    with closing(Shared(device, Scope.LAYER)) as shared:
        shared.sequences, shared.queries = shared.sequences[::-1], shared.queries[::-1]
        found = together(shared)
        assert shared.shadows.shared_launches == 1
        assert device.lost == 0
        assert same(found[::-1], expected)
        # The twin: a launch that is not read is lost with the next.
        shared.shadows.score(Scope.LAYER, *one_launch(shared))
        assert same(shared.chosen()[::-1], expected)
        assert device.lost == 1


@pytest.mark.parametrize("name", DEVICES)
def test_a_flipped_bit_on_the_device_shows_in_all_of_them(name):
    with closing(Shared(golden_device(1), Scope.LAYER)) as alone:
        expected = alone.chosen()
    with closing(Shared(Forgetful(DEVICES[name]()), Scope.LAYER)) as shared:
        shared.scorer.begin_together(shared.asked())
        found = shared.chosen()
        assert shared.shadows.shared_launches == 1
    for one, right in zip(found, expected, strict=True):
        assert not same([one], [right])


@pytest.mark.parametrize(("kind", "number"), [("score", 0), ("part", 0), ("part", 1)])
def test_a_device_that_fails_in_a_shared_pass_is_lost_and_changes_nothing(kind, number):
    with closing(Shared(golden_device(1), Scope.LAYER)) as alone:
        expected = alone.chosen()
    device = FailingDevice(golden_device(), kind, number)
    with closing(Shared(device, Scope.LAYER)) as shared:
        with pytest.warns(UserWarning, match="failed"):
            found = together(shared)
        assert same(found, expected)
        assert shared.shadows.lost
