# SPDX-License-Identifier: Apache-2.0
"""The order in which the HLS kernels write: no status beat before what it counts, none left out.

Buffers after a launch cannot show this. In the contract the count moves only after what it counts
is in memory, and hosts take a block's scores as soon as the count says so.
"""

import struct
from collections import Counter
from functools import cache

import numpy as np
import pytest
from launch_cases import random_launch, random_shadow_launch, spoil
from recorded_writes import run_recorded

from hillinfer_model.beats import beat_count
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.descriptor import Descriptor
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_error import ErrorCode
from hillinfer_model.layout import shadow_beats

BLOCK = 256
SPEC = KernelSpec(
    64, 2, 1, key_mode=KeyMode.INT8, rule=Rule.RAW_SUM, segment_tokens=1024, block_tokens=BLOCK
)
TUPLE_BYTES = 4
# Whole blocks, a last block that is short, no tokens, and less than a block.
TOKENS = [600, 0, 512, 1024, 5]
SCOPES = {"layer": Scope.LAYER, "kv_head": Scope.KV_HEAD}
LAUNCHES = [*SCOPES, "make_shadow"]


@cache
def launch_of(name):
    """A launch, what golden makes of it, and the kernel's writes."""
    if name in SCOPES:
        launch = random_launch(SPEC, SCOPES[name], TOKENS)
        return launch, *run_both("score_tokens", run_score_launch, launch)
    launch = random_shadow_launch(SPEC, TOKENS)
    return launch, *run_both("make_shadow", run_shadow_launch, launch)


def run_both(kernel, golden, launch):
    result, writes = run_recorded(kernel, SPEC, launch)
    expected = golden(SPEC, launch)
    assert np.array_equal(result.output, expected.output)
    assert np.array_equal(result.status, expected.status)
    return expected.output, writes


def counted_beats(name, descriptor, tokens):
    """Beats of the output that a status beat says are there."""
    if name == "make_shadow":
        first, count = descriptor.shadow, shadow_beats(tokens, SPEC)
        return [*range(first, first + count)]
    arrays = SPEC.kv_heads if SCOPES[name] is Scope.KV_HEAD else 1
    return [
        descriptor.score + array * descriptor.score_stride + beat
        for array in range(arrays)
        for beat in range(beat_count(TUPLE_BYTES * tokens))
    ]


def count_and_error(content):
    return struct.unpack_from("<II", content, 12)


def statuses_of(counts):
    """What the contract's status beats say, in order: segment, tokens complete and error."""
    return [
        (segment, complete, ErrorCode.NONE)
        for segment, count in enumerate(counts)
        for complete in [*range(BLOCK, count, BLOCK), count]
    ]


def assert_every_status_is_written(writes, expected):
    assert [
        (write.beat, *count_and_error(write.content)) for write in writes if write.to_status
    ] == expected


def assert_every_beat_is_written_once(name, launch, writes):
    wanted = [
        beat
        for segment, count in enumerate(TOKENS)
        for beat in counted_beats(name, descriptor_of(launch, segment), count)
    ]
    assert Counter(write.beat for write in writes if not write.to_status) == Counter(wanted)


def assert_status_follows_what_it_counts(name, launch, golden, writes):
    """Replay the writes; whenever a status beat comes, golden's beats must lie in memory."""
    there = {}
    for write in writes:
        if not write.to_status:
            there[write.beat] = write.content
            continue
        complete, _ = count_and_error(write.content)
        for beat in counted_beats(name, descriptor_of(launch, write.beat), complete):
            assert beat in there, f"{complete} tokens complete before beat {beat} is written"
            assert np.array_equal(there[beat], golden[beat])


def descriptor_of(launch, segment):
    return Descriptor.unpack(launch.segments[segment : segment + 1])


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_status_beat_per_block(name):
    """Equal to the contract's, and the twin: a beat that is left out, or written twice, shows."""
    _, _, writes = launch_of(name)
    assert_every_status_is_written(writes, statuses_of(TOKENS))
    for place in [place for place, write in enumerate(writes) if write.to_status]:
        before, behind = writes[:place], writes[place:]
        for wrong in (before + behind[1:], before + behind[:1] + behind):
            with pytest.raises(AssertionError):
                assert_every_status_is_written(wrong, statuses_of(TOKENS))


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_beat_is_written_once(name):
    launch, _, writes = launch_of(name)
    assert_every_beat_is_written_once(name, launch, writes)
    place = next(place for place, write in enumerate(writes) if not write.to_status)
    for wrong in (writes[:place] + writes[place + 1 :], [writes[place], *writes]):
        with pytest.raises(AssertionError):
            assert_every_beat_is_written_once(name, launch, wrong)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_status_beat_comes_after_what_it_counts(name):
    """The twin: any one of them before the beat that it follows."""
    launch, golden, writes = launch_of(name)
    assert_status_follows_what_it_counts(name, launch, golden, writes)
    early = [
        place
        for place, write in enumerate(writes)
        if write.to_status and place and not writes[place - 1].to_status
    ]
    # All but that of the segment without tokens.
    assert len(early) == len(statuses_of(TOKENS)) - 1
    for place in early:
        wrong = [*writes]
        wrong[place - 1 : place + 1] = wrong[place], wrong[place - 1]
        with pytest.raises(AssertionError, match="before beat"):
            assert_status_follows_what_it_counts(name, launch, golden, wrong)


def test_a_flipped_bit_in_a_beat_that_is_counted_shows():
    launch, golden, writes = launch_of("layer")
    flipped = golden.copy()
    flipped[descriptor_of(launch, 0).score, 7] ^= 1
    with pytest.raises(AssertionError):
        assert_status_follows_what_it_counts("layer", launch, flipped, writes)


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("index", [0, 2])
def test_a_wrong_descriptor_ends_the_writes(name, index):
    launch, _, _ = launch_of(name)
    launch = spoil(launch, index, ["tokens"], SPEC, SCOPES.get(name))
    kernel = "score_tokens" if name in SCOPES else "make_shadow"
    _, writes = run_recorded(kernel, SPEC, launch)
    expected = [*statuses_of(TOKENS[:index]), (index, 0, ErrorCode.DESCRIPTOR)]
    assert_every_status_is_written(writes, expected)
    assert writes[-1].to_status
