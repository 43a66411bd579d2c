# SPDX-License-Identifier: Apache-2.0
"""What the library is told of a segment is remembered as long as it is true, and no longer."""

import gc
import struct
from dataclasses import replace

import numpy as np
import pytest

from hillinfer.scoring.arguments import SegmentWords
from hillinfer.scoring.scorer import SegmentShadow, StreamedShadow
from hillinfer_model.channel_statistics import ChannelStatistics

SIZE = 1024


def segment(tokens=SIZE):
    shape = (2, 16)
    statistics = ChannelStatistics(np.zeros(shape, np.int8), np.zeros(shape, np.int32))
    return SegmentShadow(0, tokens, np.zeros((64, 64), np.uint8), statistics)


def words_of(words, one):
    return struct.unpack("=5q", words.of(one, []))


@pytest.fixture
def seen():
    return []


@pytest.fixture
def words(seen):
    return SegmentWords(SIZE, seen.append)


def test_a_full_segment_is_looked_at_once(words, seen):
    one = segment()
    first = words_of(words, one)
    assert first[0] == one.shadow.ctypes.data
    assert first[2] == one.statistics.means.ctypes.data
    assert first[3:] == (0, SIZE)
    assert words_of(words, one) == first
    assert len(seen) == 1
    assert words_of(words, segment())[0] != first[0]
    assert len(seen) == 2


def test_an_open_segment_is_looked_at_every_time(words, seen):
    one = segment(SIZE - 1)
    for _ in range(3):
        words_of(words, one)
    assert len(seen) == 3


def test_what_is_gone_is_forgotten(words, seen):
    # Soon one comes to lie where another was.
    for _ in range(10):
        one = segment()
        assert words_of(words, one)[0] == one.shadow.ctypes.data
        seen.clear()
        del one
        gc.collect()
        assert len(words) == 0


def test_a_shadow_that_comes_from_the_drive_lies_elsewhere_each_time(words):
    one = segment()
    buffers = [np.zeros((64, 64), np.uint8) for _ in range(2)]
    coming = iter(buffers)
    streamed = StreamedShadow(0, SIZE, one.statistics, lambda: next(coming))
    assert [words_of(words, streamed)[0] for _ in buffers] == [
        buffer.ctypes.data for buffer in buffers
    ]


def test_copies_of_arrays_with_gaps_are_made_for_every_call(words):
    statistics = segment().statistics
    gaps = ChannelStatistics(statistics.exponents, np.zeros((2, 32), np.int32)[:, ::2])
    one = replace(segment(), statistics=gaps)
    for _ in range(2):
        kept = []
        told = struct.unpack("=5q", words.of(one, kept))
        assert [copy.ctypes.data for copy in kept] == [told[2]]
        assert kept[0].flags.c_contiguous


def test_full_segments_are_looked_at_once_together(words, seen):
    some = [segment() for _ in range(3)]
    assert words.joined(some) is None
    told = words.join(some, [])
    assert told == b"".join(words.of(one, []) for one in some)
    assert words.joined(some) == told
    assert len(seen) == 3
    assert words.joined([]) == b""


def test_other_segments_are_not_taken_for_those_told_together(words):
    some = [segment() for _ in range(3)]
    words.join(some, [])
    for others in (some[:2], some[::-1], [*some[:2], segment()], [*some, segment()]):
        assert words.joined(others) is None
    # Fewer of them, then all again: each time what was told last.
    assert words.joined(some[:1]) is None
    words.join(some[:1], [])
    assert words.joined(some) is None


def test_segments_told_together_are_forgotten_with_any_of_them(words, seen):
    for gone in range(3):
        some = [segment() for _ in range(3)]
        words.join(some, [])
        assert words.joined(some) is not None
        seen.clear()
        del some[gone]
        gc.collect()
        # The other two by themselves.
        assert len(words) == 2


@pytest.mark.parametrize("kind", ["open", "drive", "gaps"])
def test_a_segment_that_may_change_is_not_told_together_with_others(kind, words):
    one = segment()
    gaps = ChannelStatistics(one.statistics.exponents, np.zeros((2, 32), np.int32)[:, ::2])
    buffer = np.zeros((64, 64), np.uint8)
    other = {
        "open": segment(SIZE - 1),
        "drive": StreamedShadow(SIZE, SIZE, one.statistics, lambda: buffer),
        "gaps": replace(one, statistics=gaps),
    }[kind]
    words.join([one, other], [])
    assert words.joined([one, other]) is None
