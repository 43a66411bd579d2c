# SPDX-License-Identifier: Apache-2.0
"""Trials of rankings that are no pool policies (`tools/pool_trials.py`)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from replay_cases import random_trace
from tiny_models import VOCABULARY, TinyModel

from hillinfer.settings import PoolSizes, Settings
from hillinfer_bench.quality.forced_reading import Prefix, selecting
from hillinfer_bench.replay.pool_replay import PoolReplay
from hillinfer_bench.replay.recording import record_selections
from hillinfer_bench.replay.table import replay_policy
from hillinfer_model.selection import kept_positions, select_positions
from pool_trials import (
    OCTAVE,
    TRIALS,
    MeanFromFirst,
    ScoredTrace,
    Seen,
    TrialPolicy,
    record,
    second_hits,
    trial_rows,
)

TRACE = replace(random_trace(), observed=((), ()))
SLOTS = 82


def scored(trace):
    """Return the trace with score codes that are two octaves higher for what was selected."""
    codes = []
    for sets in trace.layers:
        own = [np.full(trace.prefix + step + 1, 8192, np.uint16) for step in range(trace.steps)]
        for step, positions in enumerate(sets):
            own[step][positions] += 2 * OCTAVE
        codes.append(tuple(own))
    return ScoredTrace(trace, tuple(codes))


def replayed(trial):
    return PoolReplay(
        TRACE, TrialPolicy(scored(TRACE), TRIALS[trial]), SLOTS, PoolSizes.EQUAL
    ).run()


def seen(selected, codes, kept=()):
    chosen = np.zeros(len(codes), np.float32)
    chosen[list(selected)] = 1
    return Seen(chosen, np.asarray(codes, np.uint16), np.asarray(kept, np.int64))


def test_hits_of_which_a_quarter_fades_are_the_default_policy():
    product = replay_policy(TRACE, "decayed", SLOTS, PoolSizes.EQUAL)
    assert replayed("hits, 1/4 fades").hits.tolist() == product.hits.tolist()
    assert replayed("hits, 1/16 fades").hits.tolist() != product.hits.tolist()


def test_every_trial_and_the_bound_have_a_row_for_each_size():
    trace = replace(TRACE, layers=tuple(sets[:4] for sets in TRACE.layers))
    rows = trial_rows(scored(trace), [0.5, 1.0])
    assert [row.trial for row in rows] == 2 * [*TRIALS, "belady, demand"]
    best = {row.pool_alphas: row.hit_rate for row in rows if row.trial == "belady, demand"}
    assert all(row.hit_rate <= best[row.pool_alphas] for row in rows)
    assert all(row.promoted > 0 for row in rows if row.trial in TRIALS)


def test_margins_count_from_the_worst_score_that_was_chosen_by_score():
    codes = [9000, 9000 - OCTAVE, 9000 + OCTAVE, 20_000, 500]
    assert seen([0, 2, 3, 4], codes, kept=[4]).margins.tolist() == [0, -1, 1, 2, -2]
    # A kept token is selected whatever its score.
    assert seen([0, 2, 3, 4], codes).margins.tolist() != [0, -1, 1, 2, -2]


def test_a_near_miss_is_worth_more_than_a_far_one():
    codes = [9000, 8900, 6000]
    margin, hit = (TRIALS[name]() for name in ("margins, 1/2 fades", "hits, 1/2 fades"))
    worth, of_hits = margin(seen([0], codes)), hit(seen([0], codes))
    assert worth[0] > worth[1] > worth[2]
    assert of_hits[1] == of_hits[2]


def test_a_new_token_begins_at_its_first_margin():
    mean = MeanFromFirst(0.5)
    assert mean(np.array([1.0, 0.0], np.float32)).tolist() == [1, 0]
    assert mean(np.array([0.0, 0.0, -2.0], np.float32)).tolist() == [0.5, 0, -2]


@pytest.mark.parametrize(("steps_between", "worth_something"), [(5, True), (60, False)])
def test_what_was_not_selected_for_long_is_worth_nothing_at_first(steps_between, worth_something):
    rank, codes = second_hits(), [9000, 9000]
    for _ in range(10):
        rank(seen([0], codes))
    for _ in range(steps_between):
        rank(seen([], codes))
    assert (rank(seen([0], codes))[0] > 0) == worth_something
    assert rank(seen([0], codes))[0] > 0


def test_recorded_scores_are_those_the_sets_come_from():
    model = TinyModel().build()
    ids = torch.randint(VOCABULARY, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    settings = Settings().changed(alpha=0.2, shadow="int4")
    found = record(model, ids, 8, settings, "random")
    prefix = Prefix.read(model, ids[:-8])
    with selecting(model):
        trace = record_selections(model, prefix, ids, settings, "random", 0)
    for layer, (sets, others) in enumerate(zip(found.trace.layers, trace.layers, strict=True)):
        for step, (positions, other) in enumerate(zip(sets, others, strict=True)):
            assert positions.tolist() == other.tolist()
            codes = found.codes[layer][step]
            assert top(codes, len(positions)) == positions.tolist()
            assert top(codes[::-1], len(positions)) != positions.tolist()


def top(codes, count):
    """Return what is selected by these score codes."""
    return select_positions(codes, count, kept_positions(len(codes), 4, 32)).tolist()
