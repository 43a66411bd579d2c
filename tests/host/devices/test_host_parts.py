# SPDX-License-Identifier: Apache-2.0
"""The host's part of a sequence in C++ is that in torch, to the byte."""

from itertools import product

import numpy as np
import pytest
import torch

from hillinfer.devices.native_part import NativePart
from hillinfer.devices.resident_shadow import ResidentShadow
from hillinfer.devices.scorer import SegmentShadow
from hillinfer.devices.torch_part import TorchPart
from hillinfer.hie.probe_shadow import ProbeShadow
from hillinfer.hie.query_coding import scale_query
from hillinfer.hie.shadow_layout import ShadowLayout
from hillinfer.hie.torch_scorer import TorchScorer
from hillinfer.native.library import HOW_TO_BUILD, native_is_here
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec

pytestmark = pytest.mark.skipif(
    not native_is_here(), reason=f"the native library is not built: {HOW_TO_BUILD}"
)
MODES = (KeyMode.INT8, KeyMode.INT4, KeyMode.INT2)


def never():
    raise AssertionError("a shadow that the device has is not brought back")


def sequence(spec, count, last, on_device):
    """Full segments and a last one of `last` tokens, some of which only the device holds."""
    scorer, layout = TorchScorer(spec, Scope.LAYER), ShadowLayout(spec)
    generator = torch.Generator().manual_seed(4)
    made, statistics = [], None
    for number in range(count):
        tokens, base = (last if number == count - 1 else 1024), 1024 * number
        keys = torch.randn(tokens, spec.kv_heads, spec.head_dim, generator=generator).half()
        # Some tokens are invalid, a recent and a probe token among them.
        keys[:: 1 << 5 if tokens > 100 else 3, 0, 0] = torch.inf
        statistics = scorer.statistics(keys, base, statistics)
        shadow = np.zeros((spec.segment_beats, 64), dtype=np.uint8)
        scorer.encode(keys, statistics, shadow, 0)
        if number not in on_device:
            made.append(SegmentShadow(base, tokens, shadow, statistics))
            continue
        probes = ProbeShadow(layout, number)
        probes.take(shadow, 0, tokens)
        held = shadow if tokens < 1024 else None
        made.append(
            ResidentShadow(base, tokens, statistics, number, tokens // 64 * 64, probes, held, never)
        )
    return made


def started(part, spec, segments, coming=0):
    query = torch.randn(spec.query_heads, spec.head_dim, generator=torch.Generator().manual_seed(5))
    return part.start(scale_query(spec, 2 * query, spec.head_dim**-0.5), segments, coming)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rule", "scope"), list(product(Rule, Scope)))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("count", "last", "on_device"),
    [
        (4, 700, {0, 2}),
        (3, 300, {0, 1, 2}),
        (3, 301, {0, 1, 2}),
        (2, 1024, set()),
        (1, 5, set()),
        (3, 256, {1}),
    ],
)
def test_query_blocks_and_tuples_are_the_same(threads, rule, scope, mode, count, last, on_device):
    spec = KernelSpec(24, 2, 2, mode, rule=rule)
    segments = sequence(spec, count, last, on_device)
    assert NativePart.takes(segments)
    coming = last % 2
    native = started(NativePart(spec, scope), spec, segments, coming)
    right = started(TorchPart(spec, scope), spec, segments, coming)
    numbers = range(count)
    np.testing.assert_array_equal(native.query_blocks(numbers), right.query_blocks(numbers))
    wanted = [
        (number, range(one.device_tokens, one.tokens))
        for number, one in enumerate(segments)
        if one.device_tokens < one.tokens
    ]
    for one, other in zip(native.tuples(wanted), right.tuples(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
        # Scores that say something: neither all 0 nor all at their limit.
        assert len(np.unique(one >> 16)) >= min(one.shape[1] // 2, 5)
    right.end()
    native.end()


@pytest.mark.parametrize("scope", Scope)
def test_both_fill_the_places_of_the_host_s_tokens(threads, scope):
    """What one native call leaves among a whole sequence's tuples is what torch hands out."""
    spec = KernelSpec(24, 2, 2, KeyMode.INT4)
    segments = sequence(spec, 4, 700, {0, 2, 3})
    wanted = [
        (number, range(one.device_tokens, one.tokens))
        for number, one in enumerate(segments)
        if one.device_tokens < one.tokens
    ]
    sets = 1 if scope is Scope.LAYER else 2
    filled = []
    for part in (NativePart(spec, scope), TorchPart(spec, scope)):
        tuples = np.full((sets, 3 * 1024 + 700), 77, dtype=np.uint32)
        started(part, spec, segments).fill(wanted, tuples)
        filled.append(tuples)
    np.testing.assert_array_equal(*filled)
    # The device's places are as they were, and the host's hold scores that say something.
    assert (filled[0][:, :1024] == 77).all()
    assert (filled[0][:, 2048 : 3 * 1024 + 640] == 77).all()
    assert len(np.unique(filled[0][:, 1024:2048] >> 16)) > 50
    # The twin: a flipped bit of the host's shadow shows.
    segments[1].shadow[0, 5:8] ^= 2
    started(NativePart(spec, scope), spec, segments).fill(wanted, tuples := filled[1].copy())
    assert not np.array_equal(tuples, filled[0])


def test_what_a_lost_device_held_is_filled_from_what_is_brought_back():
    spec = KernelSpec(24, 2, 2, KeyMode.INT4)
    here, gone = sequence(spec, 3, 300, set()), sequence(spec, 3, 300, {0, 1})
    for one, own in zip(gone[:2], here[:2], strict=True):
        object.__setattr__(one, "_bring_back", lambda shadow=own.shadow: shadow)
    wanted = [(0, range(128, 1024)), (1, range(1024)), (2, range(300))]
    filled = []
    for segments in (here, gone):
        tuples = np.zeros((1, 2 * 1024 + 300), dtype=np.uint32)
        started(NativePart(spec, Scope.LAYER), spec, segments).fill(wanted, tuples)
        filled.append(tuples)
    np.testing.assert_array_equal(*filled)
    assert (filled[0][:, :128] == 0).all()
    assert (filled[0][:, 128:] > 0).all()


def test_tokens_from_the_middle_of_a_group_on():
    spec = KernelSpec(24, 2, 2, KeyMode.INT4)
    segments = sequence(spec, 2, 1000, set())
    native = started(NativePart(spec, Scope.KV_HEAD), spec, segments)
    right = started(TorchPart(spec, Scope.KV_HEAD), spec, segments)
    wanted = [(0, range(70, 1024)), (1, range(1, 2)), (1, range(999, 1000))]
    for one, other, (_, tokens) in zip(
        native.tuples(wanted), right.tuples(wanted), wanted, strict=True
    ):
        assert one.shape == (2, len(tokens))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("place", [0, 64])
def test_a_flipped_bit_among_the_probes_shows(place):
    """The twin; places 0 and 64 are a probe token and the first sink behind them."""
    spec = KernelSpec(24, 1, 2, KeyMode.INT8)
    segments = sequence(spec, 3, 300, {0})
    before = started(NativePart(spec, Scope.LAYER), spec, segments).query_blocks([0])
    group = segments[0].probes.shadow.reshape(-1, spec.group_beats, 64)[place // 64]
    group[0, place % 64 : place % 64 + 3] += 3
    after = started(NativePart(spec, Scope.LAYER), spec, segments).query_blocks([0])
    assert not np.array_equal(before, after)


def test_shadows_on_the_drive_are_left_to_torch():
    spec = KernelSpec(24, 1, 1, KeyMode.INT8)
    segments = sequence(spec, 3, 300, {0, 1})
    assert NativePart.takes(segments)
    # Recent tokens of a segment that only the device has.
    segments = sequence(spec, 3, 100, {0, 1})
    assert not NativePart.takes(segments)
    # A host's segment whose shadow is not in memory.
    gone = ResidentShadow(0, 1024, segments[0].statistics, 0, 0, segments[0].probes, None, never)
    assert not NativePart.takes([gone, *sequence(spec, 3, 300, {1})[1:]])
