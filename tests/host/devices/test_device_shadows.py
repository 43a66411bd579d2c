# SPDX-License-Identifier: Apache-2.0
"""What a device holds and scores changes no token: not its share, its room, nor its loss."""

import warnings
from contextlib import ExitStack, closing

import numpy as np
import pytest
from device_cases import slots_left
from told_runtime import (
    POSITION_BYTE,
    SCORE_BYTE,
    CountingLoads,
    FailingDevice,
    Forgetful,
    Told,
    long_story,
    same,
)

from hillinfer.errors import DeviceError, HillInferWarning
from hillinfer.scoring.layout import probe_bytes
from hillinfer.shadow.store import shadow_bytes
from hillinfer_model.choices import Rule, Scope


@pytest.fixture
def tell(cold_dir):
    with ExitStack() as told:
        yield lambda attends=False, **given: told.enter_context(
            closing(Told(cold_dir, attends=attends, **given))
        )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    kept = {}

    def of(**changes):
        key = tuple(sorted(changes.items()))
        if key not in kept:
            told = Told(tmp_path_factory.mktemp("cold"), slots=None, **changes)
            kept[key] = long_story(told)
            told.close()
        return kept[key]

    return of


@pytest.mark.parametrize(
    ("rule", "scope", "beta"),
    # Every rule in every scope, and both shares with each of them.
    [(rule, scope, 0.7 * ((one + other) % 2)) for one, rule in enumerate(Rule)
     for other, scope in enumerate(Scope)],
)  # fmt: skip
def test_a_device_changes_no_output(tell, expected, rule, scope, beta):
    told = tell(attends=True, rule=rule, scope=scope, beta=beta)
    assert same(long_story(told), expected(rule=rule, scope=scope))
    assert told.shadows.launches == len(told.outputs)
    assert not told.shadows.lost


def test_a_flipped_score_changes_the_output(tell, expected):
    told = tell(flip=SCORE_BYTE)
    assert not same(long_story(told), expected())


# With a share of 50 the host scores all of it, whatever room there is.
@pytest.mark.parametrize(("beta", "slots"), [(0.3, 100), (1.0, 3), (0.3, 1), (1.0, 100), (50.0, 3)])
def test_neither_its_share_nor_its_room_changes_the_output(tell, expected, beta, slots):
    told = tell(beta=beta, slots=slots)
    assert same(long_story(told), expected())
    if beta == 50.0:
        assert told.shadows.launches == 0
    else:
        assert told.shadows.launches > 0


@pytest.mark.parametrize(("slots", "beta"), [(1, 0.0), (2, 0.5), (3, 0.0), (6, 0.5)])
def test_shadows_that_do_not_fit_on_the_device_are_streamed_to_it(tell, expected, slots, beta):
    told = tell(wrap=CountingLoads, slots=slots, limit=0, beta=beta)
    assert same(long_story(told), expected())
    # Two layers of three segments, of which the open one is always resident where it can be.
    assert bool(told.device.loads) == (slots in (2, 3, 6))
    told.runtime.release(told.sequence)
    assert told.runtime.parts.accountant.held()["shadow"] == 0
    assert told.runtime.parts.shadow_memory.full_bytes == 0


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_device_that_cannot_load_is_replaced(tell, expected, number):
    told = tell(wrap=lambda device: FailingDevice(device, "load", number), slots=2, limit=0)
    with pytest.warns(HillInferWarning, match="load failed; the host goes on"):
        outputs = long_story(told)
    assert same(outputs, expected())


def test_the_device_scores_every_full_group_and_the_host_keeps_the_probes(tell):
    told = tell()
    told.feed(2500)
    told.feed(1)
    assert told.shadows.scored_tokens == 2 * (2501 // 64 * 64)
    told.feed(400)
    told.feed(1)
    held = [[one.shadow is not None for one in each.layers] for each in told.sequence.segments]
    # The newest 256 of 2,902 tokens lie in the open segment.
    assert held == [[False] * 2, [False] * 2, [True] * 2]
    probes = sum(probe_bytes(told.spec, number) for number in range(3))
    room = told.runtime.parts.accountant.held()["shadow"]
    assert room == 2 * (probes + shadow_bytes(told.spec))


def test_memory_and_slots_are_given_back(tell):
    told = tell()
    long_story(told)
    told.runtime.release(told.sequence)
    assert told.runtime.parts.accountant.held()["shadow"] == 0
    assert told.runtime.parts.shadow_memory.full_bytes == 0
    assert told.shadows.launches > 0
    assert slots_left(told.shadows) == told.device.slots - len(told.shadows.staging)


@pytest.mark.parametrize(
    ("kind", "number"),
    # The first time, in the second layer, and late in the story.
    [("write", 0), ("write", 1), ("write", 12), ("read", 0), ("read", 1),
     ("score", 0), ("score", 1), ("score", 9), ("part", 0), ("part", 20)],
)  # fmt: skip
def test_a_device_that_fails_is_reported_and_no_output_changes(tell, expected, kind, number):
    told = tell(wrap=lambda device: FailingDevice(device, kind, number))
    with pytest.warns(HillInferWarning, match=f"{kind} failed; the host goes on"):
        outputs = long_story(told)
    assert same(outputs, expected())
    assert told.shadows.lost
    assert told.device.closed
    told.runtime.release(told.sequence)
    assert told.runtime.parts.accountant.held()["shadow"] == 0
    assert told.runtime.parts.shadow_memory.full_bytes == 0


def test_a_lost_shadow_is_the_same_when_it_is_coded_again(tell):
    told = tell()
    told.feed(2500)
    told.feed(1)
    before = [
        [one.shadow.copy() for one in told.runtime.parts.shadow.shadows(layer, told.sequence)]
        for layer in range(2)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told.shadows.lose(DeviceError("gone"))
    for layer in range(2):
        after = told.runtime.parts.shadow.shadows(layer, told.sequence)
        for one, other in zip(after, before[layer], strict=True):
            beats = one.tokens // 64 * told.spec.group_beats
            np.testing.assert_array_equal(one.shadow[:beats], other[:beats])


def test_a_device_that_leaves_no_scores_is_replaced(tell, expected):
    told = tell(flip=POSITION_BYTE)
    with pytest.warns(HillInferWarning, match="left no scores of tokens 0 to.* the host goes on"):
        outputs = long_story(told)
    assert same(outputs, expected())
    assert told.shadows.lost


def test_a_flipped_bit_on_the_device_shows(tell, expected):
    told = tell(wrap=Forgetful)
    assert not same(long_story(told), expected())
