# SPDX-License-Identifier: Apache-2.0
"""Rows in FP16 and make_shadow between memories that stall, answer late and fail."""

from dataclasses import replace

import numpy as np
import pytest
from launch_cases import random_launch, random_shadow_launch
from rtl_kernels import LATE_ANSWERS, SMALL, session, statuses

from hillinfer_hw.memory_model import IDEAL, MEMORIES, REALISTIC, STALLS
from hillinfer_hw.rtl import check_outcome
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch
from hillinfer_model.layout import shadow_beats

TOKENS = [512, 130, 0, 300]
BLOCK = SMALL.block_tokens
BUS = 2
# Beats of a row's keys: 2 KV heads of 64 channels in 16 bits.
ROW = 4
FP16 = replace(SMALL, key_mode=KeyMode.FP16)


class Rows:
    """score_tokens that reads FP16 rows."""

    spec, kernel = FP16, "score_tokens"
    # Descriptor, statistics (2 x 64 x 4 bytes), query block (addends, exponents, codes).
    loads = 1 + 8 + 4

    @staticmethod
    def launch():
        launch = random_launch(FP16, Scope.LAYER, TOKENS)
        return launch, run_score_launch(FP16, launch)

    @staticmethod
    def complete(launch, index, count):
        """First and last byte of what a count says is complete."""
        start = 64 * int.from_bytes(launch.segments[index, 16:24].tobytes(), "little")
        return start, start + 4 * count


class Shadow:
    """make_shadow."""

    spec, kernel = SMALL, "make_shadow"
    loads = 1 + 8

    @staticmethod
    def launch():
        launch = random_shadow_launch(SMALL, TOKENS)
        return launch, run_shadow_launch(SMALL, launch)

    @staticmethod
    def complete(launch, index, count):
        start = 64 * int.from_bytes(launch.segments[index, :8].tobytes(), "little")
        whole = count if count == TOKENS[index] else count // 64 * 64
        return start, start + 64 * shadow_beats(whole, SMALL)


both = pytest.mark.parametrize("case", [Rows, Shadow], ids=["fp16", "make_shadow"])


def assert_ends_in(case, launch, golden, run, segment):
    """Segments before are whole, this one is in error, later ones untouched; golden's so far."""
    assert not check_outcome(run.outcome)
    assert run.outcome.ended == "done"
    found = statuses(run)
    assert found[:segment] == [(count, 0) for count in TOKENS[:segment]]
    assert found[segment + 1 :] == [None] * (len(TOKENS) - segment - 1)
    count, error = found[segment]
    assert error == BUS
    assert count % BLOCK == 0
    assert count < TOKENS[segment]
    flat, wanted = run.result.output.reshape(-1), golden.output.reshape(-1)
    for index, entry in enumerate(found[: segment + 1]):
        first, last = case.complete(launch, index, entry[0])
        assert np.array_equal(flat[first:last], wanted[first:last])
    return count


@both
@pytest.mark.parametrize("memory", [*MEMORIES.values(), LATE_ANSWERS], ids=lambda m: m.name)
def test_no_memory_changes_a_byte(case, memory):
    launch, golden = case.launch()
    run = session(case.kernel, case.spec).run(launch, memory, expected=golden.output)
    assert not check_outcome(run.outcome)
    assert np.array_equal(run.result.output, golden.output)
    assert np.array_equal(run.result.status, golden.status)
    assert run.outcome.status_writes == sum(-(-count // BLOCK) or 1 for count in TOKENS)


@both
@pytest.mark.parametrize("memory", [IDEAL, STALLS, REALISTIC], ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("token", "segment", "within"), [(0, 0, 0), (300, 0, 300), (520, 1, 8), (800, 3, 158)]
)
def test_a_read_error_of_keys_ends_in_the_segment_whose_keys_they_were(
    case, memory, token, segment, within
):
    launch, golden = case.launch()
    faulty = replace(memory, read_error=(ROW * token + 1, -1, -1))
    run = session(case.kernel, case.spec).run(launch, faulty, expected=golden.output)
    assert assert_ends_in(case, launch, golden, run, segment) <= within


@both
@pytest.mark.parametrize("within", [0, 1, -1])
@pytest.mark.parametrize(("before", "segment"), [(0, 0), (1, 1), (2, 2)])
def test_a_read_error_of_a_descriptor_or_block_ends_in_its_segment(case, within, before, segment):
    if before == 2:
        # A segment without tokens has a descriptor and no block; behind it lies the next one.
        segment, beat = (2, 0) if within == 0 else (3, 1 + within if within > 0 else case.loads)
        beat += 2 * case.loads
    else:
        beat = before * case.loads + within % case.loads
    launch, golden = case.launch()
    faulty = replace(STALLS, read_error=(-1, beat, -1))
    run = session(case.kernel, case.spec).run(launch, faulty, expected=golden.output)
    if segment == 2:
        assert statuses(run)[2] == (0, BUS)
        assert statuses(run)[3] is None
    else:
        assert assert_ends_in(case, launch, golden, run, segment) == 0


@both
@pytest.mark.parametrize("memory", [IDEAL, LATE_ANSWERS], ids=lambda m: m.name)
def test_a_write_error_is_never_counted_complete(case, memory):
    launch, golden = case.launch()
    endings = set()
    for answer in range(0, 40, 3):
        faulty = replace(memory, write_error=answer)
        run = session(case.kernel, case.spec).run(launch, faulty, expected=golden.output)
        assert run.outcome.ended == "done"
        assert not check_outcome(run.outcome)
        seen = [entry for entry in statuses(run) if entry is not None]
        assert all(entry == (count, 0) for entry, count in zip(seen[:-1], TOKENS, strict=False))
        if seen:
            assert seen[-1][1] in (0, BUS)
            endings.add(seen[-1][1])
    assert BUS in endings


@both
def test_after_every_ending_the_next_launch_is_right(case):
    launch, golden = case.launch()
    for ending in (
        {"memory": replace(IDEAL, read_error=(700, -1, -1))},
        {"memory": replace(IDEAL, read_error=(-1, 3, -1))},
        {"memory": replace(IDEAL, write_error=4)},
        {"memory": STALLS, "reset_at": 700},
        {"memory": REALISTIC, "reset_at": 60},
    ):
        session(case.kernel, case.spec).run(launch, **ending)
        run = session(case.kernel, case.spec).run(launch, STALLS, expected=golden.output)
        assert not check_outcome(run.outcome)
        assert np.array_equal(run.result.output, golden.output)
        assert np.array_equal(run.result.status, golden.status)


@both
def test_what_a_status_counts_is_looked_at_when_it_comes(case):
    """The twin: one bit, at the first and at the last byte that a segment's status counts.

    That the look comes with the status, test_rtl_kernel.py shows by a writer that waits for
    nothing: both kernels have the same one.
    """
    launch, golden = case.launch()
    first, last = case.complete(launch, 3, TOKENS[3])
    for place in (first, last - 1):
        flipped = golden.output.copy()
        flipped.reshape(-1)[place] ^= 1
        run = session(case.kernel, case.spec).run(launch, LATE_ANSWERS, expected=flipped)
        # A whole segment's first byte is counted by each of its blocks, the last one by one status.
        assert run.outcome.snapshot_errors == (-(-TOKENS[3] // BLOCK) if place == first else 1)
        assert np.array_equal(run.result.output, golden.output)
