# SPDX-License-Identifier: Apache-2.0
"""The order of systems, and the figures of their steps."""

import pytest

from hillinfer_bench.decode.measuring import turns
from hillinfer_bench.report.rows import Timing


@pytest.mark.parametrize(("systems", "steps", "length", "warm_up"), [(3, 14, 4, 4), (1, 5, 2, 0)])
def test_every_system_takes_every_step_once_and_in_order(systems, steps, length, warm_up):
    taken = {system: [] for system in range(systems)}
    for turn in turns(systems, steps, length, warm_up):
        taken[turn.system] += range(turn.first, turn.end)
    assert taken == {system: list(range(steps)) for system in range(systems)}


def test_no_system_is_a_turn_ahead_and_every_round_begins_with_another():
    rounds = list(turns(3, 16, 4))
    begin = [rounds[place].system for place in range(0, 12, 3)]
    assert begin == [0, 1, 2, 0]
    for place in range(0, 12, 3):
        own = rounds[place : place + 3]
        assert {turn.system for turn in own} == {0, 1, 2}
        assert len({turn.first for turn in own}) == 1


def test_the_warm_up_is_a_turn_of_its_own():
    first, second = list(turns(1, 10, 4, warm_up=6))[:2]
    assert (first.first, first.end, second.first) == (0, 6, 6)


def test_figures_of_steps():
    timing = Timing.of([0.010] * 8 + [0.011, 0.012])
    assert timing.minimum == pytest.approx(10)
    assert timing.median == pytest.approx(10)
    assert not timing.flagged


@pytest.mark.parametrize(("slow", "flagged"), [(0.0119, False), (0.0125, True)])
def test_a_spread_above_a_fifth_is_flagged(slow, flagged):
    timing = Timing.of([0.010] * 8 + [slow] * 3)
    assert timing.flagged is flagged
