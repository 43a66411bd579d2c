# SPDX-License-Identifier: Apache-2.0
"""Documents that take turns in one pool (`tools/pool_turns.py`)."""

import pytest
from replay_cases import random_trace

from pool_turns import RANKINGS, cold_rows, turns

TRACES = [random_trace(steps=60, seed=seed) for seed in (0, 1)]
SLOTS = 120


def test_everybody_takes_as_many_steps_a_block_at_a_time():
    assert turns(2, 2, 3) == [0, 0, 1, 1, 0, 1]
    assert turns(3, 1, 2) == [0, 1, 2] * 2


def played(ranking, block):
    return cold_rows(TRACES, turns(2, block, 60), SLOTS, ranking)


@pytest.mark.parametrize("ranking", RANKINGS)
def test_a_pool_that_holds_everything_has_no_cold_rows_for_long(ranking):
    few = cold_rows(TRACES, turns(2, 10, 60), 4 * SLOTS, ranking)
    assert few < played(ranking, 10)


def test_rows_of_a_document_that_takes_turns_by_long_blocks_give_way():
    assert played("decayed", 20) < 0.95 * played("own steps alone", 20)


def test_single_steps_in_turn_change_nothing():
    assert played("decayed", 1) == played("own steps alone", 1) != played("lru", 1)
