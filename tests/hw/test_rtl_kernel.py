# SPDX-License-Identifier: Apache-2.0
"""The simulated RTL between memories that stall, answer late and fail."""

from dataclasses import replace

import numpy as np
import pytest
from launch_cases import random_launch
from rtl_kernels import LATE_ANSWERS, SMALL, early_status, session, statuses

from hillinfer_hw.memory_model import IDEAL, MEMORIES, REALISTIC, STALLS
from hillinfer_hw.rtl import check_outcome
from hillinfer_model.choices import Scope
from hillinfer_model.golden_launch import run_score_launch

TOKENS = [512, 130, 0, 300]
BLOCK = SMALL.block_tokens
BUS = 2


def launch_of(scope=Scope.LAYER):
    launch = random_launch(SMALL, scope, TOKENS)
    return launch, run_score_launch(SMALL, launch)


def assert_complete_tokens_are_golden(launch, golden, run):
    """What the status beats count complete is golden's, and nothing lies beside the scores."""
    assert not check_outcome(run.outcome)
    assert run.outcome.ended == "done"
    output = run.result.output
    untouched = golden.output == launch.scores
    assert np.array_equal(output[untouched], launch.scores[untouched])
    for descriptor, entry in zip(launch.segments, statuses(run), strict=True):
        if entry is not None:
            start = int.from_bytes(descriptor[16:24].tobytes(), "little")
            flat = output[start:].reshape(-1)[: 4 * entry[0]]
            assert np.array_equal(flat, golden.output[start:].reshape(-1)[: 4 * entry[0]])


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("memory", [*MEMORIES.values(), LATE_ANSWERS], ids=lambda m: m.name)
def test_no_memory_changes_a_byte(memory, scope):
    launch, golden = launch_of(scope)
    for seed in (1, 2):
        run = session().run(launch, replace(memory, seed=seed), expected=golden.output)
        assert not check_outcome(run.outcome)
        assert np.array_equal(run.result.output, golden.output)
        assert np.array_equal(run.result.status, golden.status)
        # One per block, one for the segment without tokens.
        assert run.outcome.status_writes == sum(-(-count // BLOCK) or 1 for count in TOKENS)


@pytest.mark.parametrize(
    ("beat", "wanted"),
    [
        (3, [(0, BUS), None, None, None]),
        (1000, [(448, BUS), None, None, None]),
        (1500, [(512, 0), (130, 0), (0, 0), (64, BUS)]),
    ],
)
@pytest.mark.parametrize("memory", [IDEAL, STALLS, REALISTIC], ids=lambda m: m.name)
def test_a_read_error_of_keys_ends_in_the_segment_whose_keys_they_were(beat, wanted, memory):
    # Groups of 130 beats: 1000 lies in the eighth group, 1500 in the second of the last segment.
    launch, golden = launch_of()
    run = session().run(launch, replace(memory, read_error=(beat, -1, -1)), expected=golden.output)
    assert statuses(run) == wanted
    assert_complete_tokens_are_golden(launch, golden, run)


@pytest.mark.parametrize(
    ("beat", "segment"), [(0, 0), (1, 0), (4, 0), (5, 1), (6, 1), (11, 3), (14, 3)]
)
def test_a_read_error_of_a_descriptor_or_query_ends_in_its_segment(beat, segment):
    # A descriptor and four beats of query block per segment; a segment without tokens has none.
    launch, golden = launch_of()
    run = session().run(launch, replace(STALLS, read_error=(-1, beat, -1)), expected=golden.output)
    wanted = [(count, 0) for count in TOKENS[:segment]] + [(0, BUS)]
    assert statuses(run) == wanted + [None] * (len(TOKENS) - len(wanted))
    assert_complete_tokens_are_golden(launch, golden, run)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("memory", [IDEAL, LATE_ANSWERS], ids=lambda m: m.name)
def test_a_write_error_is_never_counted_complete(memory, scope):
    launch, golden = launch_of(scope)
    endings = set()
    for answer in range(0, 40, 3):
        run = session().run(launch, replace(memory, write_error=answer), expected=golden.output)
        assert run.outcome.ended == "done"
        assert not check_outcome(run.outcome)
        seen = [entry for entry in statuses(run) if entry is not None]
        assert all(entry == (count, 0) for entry, count in zip(seen[:-1], TOKENS, strict=False))
        if seen:
            count, error = seen[-1]
            # A status beat whose own write fails cannot say so.
            assert error in (0, BUS)
            assert count % BLOCK == 0 or (count == TOKENS[len(seen) - 1] and not error)
            endings.add(error)
    assert BUS in endings


def test_after_every_ending_the_next_launch_is_right():
    launch, golden = launch_of()
    for ending in (
        {"memory": replace(IDEAL, read_error=(700, -1, -1))},
        {"memory": replace(IDEAL, write_error=4)},
        {"memory": STALLS, "reset_at": 700},
        {"memory": REALISTIC, "reset_at": 60},
    ):
        session().run(launch, **ending)
        run = session().run(launch, STALLS, expected=golden.output)
        assert not check_outcome(run.outcome)
        assert np.array_equal(run.result.output, golden.output)
        assert np.array_equal(run.result.status, golden.status)


def test_buffers_may_lie_anywhere_on_whole_beats():
    launch, golden = launch_of()
    run = session().run(launch, IDEAL, expected=golden.output, offset_beats=13)
    assert not check_outcome(run.outcome)
    assert np.array_equal(run.result.output, golden.output)


def test_a_status_that_does_not_wait_for_responses_is_seen():
    launch, golden = launch_of()
    early = early_status()
    run = early.run(launch, LATE_ANSWERS, expected=golden.output)
    early.close()
    assert run.outcome.snapshot_errors
