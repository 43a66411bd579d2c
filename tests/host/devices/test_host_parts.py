# SPDX-License-Identifier: Apache-2.0
"""The host's part of a sequence beside a device is that of the twin in torch, to the byte."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from pairwise import pairwise
from twins.query_path import scale_query
from twins.torch_part import TorchPart
from twins.torch_scorer import TorchScorer

from hillinfer.devices.device import ResidentShadow
from hillinfer.devices.started_scoring import NativePart
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout
from hillinfer.scoring.scorer import SegmentShadow, StreamedShadow, total_tokens
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec

MODES = (KeyMode.INT8, KeyMode.INT4, KeyMode.INT2)


def never():
    raise AssertionError("a shadow that the device has is not brought back")


def shadow_of(segment):
    return segment.shadow


def sequence(spec, count, last, on_device, brought=None):
    """Full segments and a last one of `last` tokens, some of which only the device holds.

    Those in `brought` are brought back as the segments that it has for them.
    """
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
        bring = partial(shadow_of, (brought or {})[number]) if number in (brought or {}) else never
        made.append(
            ResidentShadow(base, tokens, statistics, number, tokens // 64 * 64, probes, held, bring)
        )
    return made


def started(part, spec, segments, coming=0):
    query = torch.randn(spec.query_heads, spec.head_dim, generator=torch.Generator().manual_seed(5))
    return part.start(scale_query(spec, 2 * query, spec.head_dim**-0.5), segments, coming)


def all_of_the_host(segments):
    return [
        (number, range(one.device_tokens, one.tokens))
        for number, one in enumerate(segments)
        if one.device_tokens < one.tokens
    ]


def each(made, sets, segments, wanted):
    """The tuples of tokens that are filled in one by one, as none but they are wanted."""
    for number, tokens in wanted:
        tuples = np.zeros((sets, total_tokens(segments)), dtype=np.uint32)
        made.fill([(number, tokens)], tuples)
        first = segments[number].base_position + tokens.start
        yield tuples[:, first : first + len(tokens)]


THREADS = [1, 3]


@pytest.fixture(params=THREADS)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


# Rule and scope meet in one function, so they come as one here.
SCORES = list(product(Rule, Scope))
# Segments, tokens of the last one, and which of them a device has.
HELD = [
    (4, 700, {0, 2}),
    (3, 300, {0, 1, 2}),
    (3, 301, {0, 1, 2}),
    (2, 1024, set()),
    (1, 5, set()),
    (3, 256, {1}),
]


@pytest.mark.parametrize(
    ("held", "scores", "mode", "threads"),
    pairwise([HELD, SCORES, list(MODES), THREADS]),
    indirect=["threads"],
)
def test_query_blocks_and_tuples_are_the_same(held, scores, mode, threads):
    (count, last, on_device), (rule, scope) = held, scores
    spec = KernelSpec(24, 2, 2, mode, rule=rule)
    segments = sequence(spec, count, last, on_device)
    coming = last % 2
    native = started(NativePart(spec, scope), spec, segments, coming)
    right = started(TorchPart(spec, scope), spec, segments, coming)
    numbers = range(count)
    np.testing.assert_array_equal(native.query_blocks(numbers), right.query_blocks(numbers))
    sets, wanted = 1 if scope is Scope.LAYER else 2, all_of_the_host(segments)
    for one, other in zip(
        *(each(part, sets, segments, wanted) for part in (native, right)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
        # Scores that say something: neither all 0 nor all at their limit.
        assert len(np.unique(one >> 16)) >= min(one.shape[1] // 2, 5)
    right.end()


@pytest.mark.parametrize("scope", Scope)
def test_both_fill_the_places_of_the_host_s_tokens(threads, scope):
    """What one native call leaves among a whole sequence's tuples is what torch hands out."""
    spec = KernelSpec(24, 2, 2, KeyMode.INT4)
    segments = sequence(spec, 4, 700, {0, 2, 3})
    wanted = all_of_the_host(segments)
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
    here = sequence(spec, 3, 300, set())
    gone = sequence(spec, 3, 300, {0, 1}, dict(enumerate(here[:2])))
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
    found = [each(part, 2, segments, wanted) for part in (native, right)]
    for one, other, (_, tokens) in zip(*found, wanted, strict=True):
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


class Drive:
    """Hands out shadows in the order of their segments only, in one buffer."""

    def __init__(self, spec):
        self._buffer = np.zeros((spec.segment_beats, 64), dtype=np.uint8)
        self._last = -1
        self.reads = 0

    def reader(self, number, shadow):
        def read():
            assert number >= self._last, "read twice, or out of order"
            self.reads += number != self._last
            self._last = number
            self._buffer[:] = shadow
            return self._buffer

        return read


def on_drive(spec, segments, numbers):
    """The same segments, some of them on a drive; the host scores what no device has."""
    drive, made = Drive(spec), list(segments)
    for number in numbers:
        one = segments[number]
        made[number] = StreamedShadow(
            one.base_position, one.tokens, one.statistics, drive.reader(number, one.shadow)
        )
    return drive, made


# Segments on the drive: long gone ones, and such as hold some of the newest 256 tokens.
ON_DRIVE = [(700, (1, 3), {0}), (100, (0, 2, 3), {1}), (255, (3,), {0, 1}), (256, (3,), set())]


# A token that comes moves the newest ones: it meets all of their numbers.
@pytest.mark.parametrize(
    ("lying", "scores", "mode", "threads"),
    pairwise([list(product(ON_DRIVE, (0, 1))), SCORES, list(MODES), THREADS]),
    indirect=["threads"],
)
def test_shadows_on_the_drive_are_read_once(lying, scores, mode, threads):
    ((last, numbers, on_device), coming), (rule, scope) = lying, scores
    spec = KernelSpec(24, 2, 2, mode, rule=rule)
    segments = sequence(spec, 5, last, on_device)
    length = 4 * 1024 + last
    sets = 1 if scope is Scope.LAYER else 2
    filled, blocks = [], []
    for part in (NativePart(spec, scope), TorchPart(spec, scope)):
        drive, own = on_drive(spec, segments, numbers)
        made = started(part, spec, own, coming)
        assert drive.reads == len(numbers)
        blocks.append(made.query_blocks(range(5)))
        tuples = np.full((sets, length), 77, dtype=np.uint32)
        made.fill(all_of_the_host(own), tuples)
        filled.append(tuples)
        one_by_one = np.full_like(tuples, 77)
        for one in all_of_the_host(own):
            made.fill([one], one_by_one)
        np.testing.assert_array_equal(one_by_one, tuples)
        assert drive.reads == len(numbers)
    np.testing.assert_array_equal(*blocks)
    np.testing.assert_array_equal(*filled)
    # Scores that say something.
    base = 1024 * numbers[0]
    assert len(np.unique(filled[0][:, base : base + 1024] >> 16)) >= 5


def test_a_flipped_bit_on_the_drive_shows():
    """The twin of the above: of a recent segment, and of one that has only probe tokens."""
    spec = KernelSpec(24, 2, 2, KeyMode.INT4)
    segments = sequence(spec, 3, 100, {0})
    found = []
    for flipped in (None, 1, 2):
        own = [*segments]
        if flipped is not None:
            own[flipped] = replace(own[flipped], shadow=own[flipped].shadow.copy())
            own[flipped].shadow[2:6] ^= 0x11
        _, streamed = on_drive(spec, own, (1, 2))
        made = started(NativePart(spec, Scope.LAYER), spec, streamed)
        tuples = np.zeros((1, 2 * 1024 + 100), dtype=np.uint32)
        made.fill(all_of_the_host(streamed), tuples)
        found.append(tuples)
    assert not np.array_equal(found[0][:, 1024:2048], found[1][:, 1024:2048])
    assert not np.array_equal(found[0][:, 2048:], found[2][:, 2048:])


def test_recent_tokens_that_only_the_device_has_are_brought_back():
    spec = KernelSpec(24, 1, 1, KeyMode.INT8)
    here = sequence(spec, 3, 100, set())
    gone = sequence(spec, 3, 100, {0, 1}, {1: here[1]})
    blocks = [
        started(part(spec, Scope.LAYER), spec, gone).query_blocks(range(3))
        for part in (NativePart, TorchPart)
    ]
    np.testing.assert_array_equal(*blocks)
