# SPDX-License-Identifier: Apache-2.0
"""The recurrence of a pass says what a simulation of drive and processor does."""

import random

import pytest
from golden_pass import simulate

from hillinfer.doctor.timetables import LayerWork, Timetable

MIB = 1 << 20


def cases(count, seed):
    chance = random.Random(seed)
    for _ in range(count):
        layers = chance.randint(1, 9)
        most = chance.choice([3, 12])
        slow = chance.choice([1, 6])
        yield [
            (
                chance.randint(0, most),
                chance.randint(0, most),
                chance.randint(0, most),
                slow * chance.randint(0, most),
            )
            for _ in range(layers)
        ]


def table_of(work, buffers, **given):
    return Timetable.of([LayerWork(*own) for own in work], buffers, **given)


@pytest.mark.parametrize("buffers", [0, 1, 2, 3, 20])
def test_the_recurrence_is_what_a_simulation_does(buffers):
    differs = 0
    for work in cases(150, buffers):
        expected = simulate(work, buffers)
        found = table_of(work, buffers).layers
        assert [one.rows for one in found] == expected.rows, work
        assert [one.attends for one in found] == expected.attends, work
        assert [one.through for one in found] == expected.through, work
        # The twin: a drive that takes one tick longer is told apart.
        differs += simulate(work, buffers, wrong=1).rows != expected.rows
    assert differs == 150


def test_bubbles_and_computing_are_all_there_is():
    for work in cases(100, 7):
        found = table_of(work, 2)
        computing = sum(sum(own[:3]) for own in work)
        assert found.seconds == computing + found.bubble_seconds
        assert table_of(work, 20).seconds <= found.seconds <= table_of(work, 0).seconds


def test_where_reading_limits_nothing_is_written_before_the_last_read():
    slow = table_of([(1, 2, 1, 9)] * 5, 5)
    assert [slow.write_bytes(layer, 1e9, 0.0, MIB) for layer in range(5)] == [0] * 5
    assert slow.bubble_seconds > 0


def test_slack_is_written_in_whole_quanta_less_what_mixing_loses():
    work = [(0.001, 0.002, 0.005, 0.004)] * 3
    table = table_of(work, 3)
    assert table.layers[1].slack == pytest.approx(0.004)
    assert table.write_bytes(1, 1e9, 0.0, MIB) == 3 * MIB
    assert table.write_bytes(1, 1e9, 0.6, MIB) == 1 * MIB
    assert table.write_bytes(1, 1e9, 1.0, MIB) == 0
    assert table_of(work, 3, margin=0.0035).write_bytes(1, 1e9, 0.0, MIB) == 0


def test_no_layers_take_no_time():
    assert table_of([], 2).seconds == table_of([], 2).bubble_seconds == 0
