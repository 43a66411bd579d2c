# SPDX-License-Identifier: Apache-2.0
"""A core that stands for a device scores what a device would, while the host scores its share."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from told_runtime import Forgetful, Told, long_story, same

from hillinfer.devices.device import (
    DeviceSegment,
    ResidentShadow,
    ScoreArrays,
    pack_query_blocks,
    unpack_query_blocks,
)
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import CoreDevice, sorted_top
from hillinfer.errors import warn_of_loss
from hillinfer.native.library import NativeError
from hillinfer.rates.profiling import sample_shadows
from hillinfer.scoring.launches import LaunchQueries, LaunchThread
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import Wanted
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.golden_launch import run_score_launch
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.query_block import QueryBlock
from hillinfer_model.score_launch import SCOPE_NUMBERS, ScoreLaunch

SPECS = [
    KernelSpec(64, 3, 3, KeyMode.INT4),
    KernelSpec(24, 2, 1, KeyMode.INT8),
    KernelSpec(64, 2, 4, KeyMode.INT2, rule=Rule.RAW_SUM),
]


def queries_of(spec, segments, seed=0):
    chance = np.random.default_rng(seed)
    heads = (segments, spec.scored_heads)
    codes = np.zeros((*heads, spec.padded_head_dim), dtype=np.int8)
    codes[..., : spec.head_dim] = chance.integers(-127, 128, (*heads, spec.head_dim))
    return LaunchQueries(
        codes,
        chance.integers(-12, -7, heads).astype(np.int32),
        chance.integers(-(2**12), 2**4, heads).astype(np.int32),
    )


def held(spec, device, slot):
    """What a device holds of a slot."""
    into = np.empty((spec.segment_beats, BEAT_BYTES), np.uint8)
    device.read(slot, into)
    return into


def filled(spec, count, core=None):
    device = CoreDevice(spec, core)
    for number, own in enumerate(sample_shadows(spec, count)):
        # Segments hold the same codes: each is given another first beat of exponents.
        own.shadow[0] = 8 + number
        device.write(number, 0, own.shadow)
    return device


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key_mode.value)
def test_blocks_are_packed_as_the_contract_has_them(spec):
    queries = queries_of(spec, 5)
    blocks = pack_query_blocks(spec, queries)
    for number, block in enumerate(np.split(blocks, 5)):
        right = QueryBlock(
            queries.addends[number],
            queries.exponents[number].astype(np.int8),
            queries.codes[number, :, : spec.head_dim],
        ).pack(spec)
        np.testing.assert_array_equal(block, right)
    back = unpack_query_blocks(spec, blocks, 5)
    for name in ("codes", "exponents", "addends"):
        np.testing.assert_array_equal(getattr(back, name), getattr(queries, name))


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key_mode.value)
def test_a_launch_leaves_what_the_golden_model_leaves(spec, scope, launch_of):
    given = [DeviceSegment(2, 0, 1024), DeviceSegment(0, 1024, 1024), DeviceSegment(1, 2048, 130)]
    blocks = pack_query_blocks(spec, queries_of(spec, len(given)))
    with closing(filled(spec, 3)) as device:
        found = list(device.score(scope, blocks, given))
        launch, arrays = launch_of(spec, scope, device, blocks, given)
        result = run_score_launch(spec, launch)
        for index, (one, own) in enumerate(zip(found, given, strict=True)):
            assert (one.segment, one.first_token) == (index, 0)
            right = arrays.scored(index, 0, own.tokens, result.output)
            np.testing.assert_array_equal(one.tuples, right.tuples)
            # Scores that say something: neither all 0 nor all at their limit.
            assert len(np.unique(one.tuples >> 16)) > 50
        group = held(spec, device, 1)[spec.kv_heads : spec.group_beats]
        device.write(1, spec.kv_heads, group ^ 0x11)
        changed = list(device.score(scope, blocks, given))
    assert np.array_equal(changed[0].tuples, found[0].tuples)
    assert not np.array_equal(changed[2].tuples, found[2].tuples)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return what the host alone answers in a scope, computed once."""
    kept = {}

    def of(scope):
        if scope not in kept:
            cold_dir = tmp_path_factory.mktemp("cold")
            with closing(Told(cold_dir, slots=None, scope=scope)) as plain:
                kept[scope] = long_story(plain)
        return kept[scope]

    return of


@pytest.mark.parametrize(
    ("beta", "scope"),
    [(0.0, Scope.KV_HEAD), (0.7, Scope.LAYER), (0.7, Scope.KV_HEAD), (3.0, Scope.LAYER)],
)
def test_it_changes_no_output(cold_dir, expected, beta, scope):
    with closing(Told(cold_dir, core=True, beta=beta, scope=scope)) as told:
        assert same(long_story(told), expected(scope))
        assert told.shadows.launches > 0
        assert not told.shadows.lost


@pytest.fixture(params=list(Scope))
def two_sides(request):
    """A scorer, and four segments of which its device holds two."""
    spec = SPECS[0]
    scorer = DeviceScorer(
        NativeScorer(spec, request.param), DeviceShadows(spec, CoreDevice(spec), 1.0, warn_of_loss)
    )
    segments = list(sample_shadows(spec, 4))
    chance = np.random.default_rng(3)
    for number, own in enumerate(segments):
        # Each another's codes, so that sets are of all of them.
        own.shadow[spec.kv_heads :: spec.group_beats] = chance.integers(
            0, 256, own.shadow[spec.kv_heads :: spec.group_beats].shape, dtype=np.uint8
        )
        own.probe_copy.take(own.shadow, 0, 1024)
        if number in (0, 2):
            place = scorer.shadows.room(number)
            scorer.shadows.update(place, own.shadow, 1024)
            segments[number] = ResidentShadow(
                own.base_position, 1024, own.statistics, place.slot, 1024, place.probes, None, never
            )
    yield scorer, segments
    scorer.shadows.close()


def never():
    raise AssertionError("a shadow that the device has is not brought back")


def equal(mine, other):
    return len(mine) == len(other) and all(map(np.array_equal, mine, other))


@pytest.mark.parametrize("coming", [0, 1])
def test_the_top_of_two_sides_is_that_of_a_sort(two_sides, coming):
    scorer, segments = two_sides
    query = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    wanted = Wanted(300, 4, 60)
    expected = sorted_top(scorer.tuples(query, 0.05, segments, coming), wanted, coming)
    assert equal(scorer.choose(query, 0.05, segments, coming, [wanted])[0], expected)
    assert scorer.shadows.launches == 2
    # Of what both sides scored.
    for number in range(4):
        assert any(np.any(own // 1024 == number) for own in expected)
    # The twin: bits flipped in what the device holds, and then in what the host does.
    spec, device, slot = SPECS[0], scorer.shadows.device, segments[2].slot
    exponents = held(spec, device, slot)[: spec.kv_heads]
    device.write(slot, 0, exponents ^ 3)
    assert not equal(scorer.choose(query, 0.05, segments, coming, [wanted])[0], expected)
    device.write(slot, 0, exponents)
    assert equal(scorer.choose(query, 0.05, segments, coming, [wanted])[0], expected)
    segments[1].shadow[: spec.kv_heads] ^= 3
    assert not equal(scorer.choose(query, 0.05, segments, coming, [wanted])[0], expected)


def test_what_two_sides_cannot_choose_is_refused(two_sides):
    scorer, segments = two_sides
    query = torch.zeros(9, 64)
    with pytest.raises(ValueError, match="count=5000"):
        scorer.choose(query, 0.05, segments, 0, [Wanted(5000, 4, 60)])[0]
    with pytest.raises(ValueError, match="segment 1"):
        scorer.choose(query, 0.05, [segments[0], segments[2]], 0, [Wanted(300, 4, 60)])[0]
    with pytest.raises(ValueError, match="query"):
        scorer.choose(query[:3], 0.05, segments, 0, [Wanted(300, 4, 60)])[0]
    query[0, 0] = torch.inf
    with pytest.raises(NonFiniteQueryError):
        scorer.choose(query, 0.05, segments, 0, [Wanted(300, 4, 60)])[0]
    assert not scorer.shadows.lost


def test_a_flipped_bit_in_its_memory_shows(cold_dir, expected):
    with closing(Told(cold_dir, core=True, wrap=Forgetful)) as told:
        assert not same(long_story(told), expected(Scope.LAYER))


def test_it_scores_while_the_host_does_something_else():
    """A launch is begun at once, and waited for where its tuples are asked for."""
    spec = SPECS[0]
    blocks = pack_query_blocks(spec, queries_of(spec, 2))
    calls = []

    class Noting(LaunchThread):
        def begin(self, *given):
            calls.append("begin")
            super().begin(*given)

        def wait(self):
            calls.append("wait")
            super().wait()

    with closing(filled(spec, 2, Noting())) as device:
        calls.clear()
        found = device.score(
            Scope.LAYER, blocks, [DeviceSegment(0, 0, 64), DeviceSegment(1, 1024, 64)]
        )
        # The host is here, and the launch under way, after one that nobody may look at any more.
        assert calls == ["wait", "begin"]
        assert [one.tuples.shape for one in found] == [(1, 64)] * 2
        assert calls == ["wait", "begin", "wait"]


def test_one_launch_after_the_other():
    """The next one begins when the one before has left its tuples, read or not."""
    spec = SPECS[0]
    with closing(filled(spec, 2)) as device:
        given = [DeviceSegment(0, 0, 1024), DeviceSegment(1, 1024, 1024)]
        blocks = [pack_query_blocks(spec, queries_of(spec, 2, seed)) for seed in range(4)]
        right = [list(device.score(Scope.LAYER, own, given)) for own in blocks]
        waiting = [device.score(Scope.LAYER, own, given) for own in blocks]
        for found, expected in zip(map(list, waiting), right, strict=True):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one.tuples, other.tuples)
        assert not np.array_equal(right[0][0].tuples, right[1][0].tuples)


def test_a_launch_that_nobody_reads_ends_before_its_shadow_changes():
    spec = SPECS[0]
    blocks = pack_query_blocks(spec, queries_of(spec, 1))
    with closing(filled(spec, 1)) as device:
        given = [DeviceSegment(0, 0, 1024)]
        right = next(iter(device.score(Scope.LAYER, blocks, given))).tuples
        waiting = device.score(Scope.LAYER, blocks, given)
        device.write(0, 0, np.zeros((spec.segment_beats, 64), np.uint8))
        np.testing.assert_array_equal(next(iter(waiting)).tuples, right)


def test_a_closed_core_scores_nothing():
    spec = SPECS[0]
    device = filled(spec, 1)
    device.close()
    device.close()
    blocks = pack_query_blocks(spec, queries_of(spec, 1))
    with pytest.raises(NativeError, match="closed"):
        device.score(Scope.LAYER, blocks, [DeviceSegment(0, 0, 64)])


@pytest.fixture
def launch_of():
    def of(spec, scope, device, blocks, given):
        arrays = ScoreArrays(spec, scope, given)
        launch = ScoreLaunch(
            segments=arrays.descriptors([one.slot * spec.segment_beats for one in given]),
            shadow=np.concatenate([held(spec, device, slot) for slot in range(4)]),
            statistics=np.zeros((0, 64), dtype=np.uint8),
            queries=blocks,
            scores=np.zeros((arrays.beats, 64), dtype=np.uint8),
            scope=SCOPE_NUMBERS[scope],
            launch_id=1,
        )
        return launch, arrays

    return of


# Launches long enough to be under way whatever comes next.
UNDER_WAY = """
import os, signal, sys
sys.path[:0] = sys.argv[1:3]
import numpy as np
from test_core_device import DeviceSegment, SPECS, Scope, filled, pack_query_blocks, queries_of
spec, many = SPECS[0], 400
blocks = pack_query_blocks(spec, queries_of(spec, many))

def begin():
    device = filled(spec, 1)
    device.score(
        Scope.LAYER, blocks, [DeviceSegment(0, 1024 * number, 1024) for number in range(many)]
    )
    return device
"""
# One that is dropped, and then one that a child is forked beside.
DROPPED_AND_FORKED = """
begin()
device = begin()
child = os.fork()
if not child:
    signal.alarm(20)
    try:
        device.write(0, 0, np.zeros((1, 64), np.uint8))
    except Exception as error:
        print(type(error).__name__, flush=True)
    device.close()
    del device
    os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
device.close()
"""


def test_a_launch_under_way_has_all_that_it_reads():
    """Whoever drops the device; and a forked child, which has no such thread, waits for none."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", UNDER_WAY + DROPPED_AND_FORKED, str(here), str(here.parents[1])],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "NativeError\n0\n"), done.stderr
