# SPDX-License-Identifier: Apache-2.0
"""What doctor says of a pass behind a stored prefix is what drive and processor do."""

import random
import re

import pytest
from golden_pass import simulate

from hillinfer.doctor.profile import stored_prefix_finding
from hillinfer.schedule.drive_rates import DriveRates

MIB = 1 << 20


def said_of(layers, window, read, write=1.0, mixing_loss=0.0):
    """Return seconds of a pass, milliseconds of waiting, and what is left for writes.

    Windows and reads are in hundredths of a second.
    """
    drive = DriveRates((MIB,), (100.0,), write, mixing_loss)
    found = stored_prefix_finding(64, read, layers, 1, window / 100, drive).found
    seconds, waiting = re.search(r"take ([\d.]+) s, ([\d.]+) ms", found).groups()
    return float(seconds), float(waiting), re.search(r"leaves (.*) in slack", found)[1]


def cases(count, seed):
    chance = random.Random(seed)
    for _ in range(count):
        yield (
            chance.randint(1, 9),
            chance.randint(0, 12),
            chance.choice([1, 6]) * chance.randint(1, 12),
        )


def test_it_says_what_a_simulation_does():
    differs = 0
    for layers, window, read in cases(150, 1):
        work = [(0, window, 0, read)] * layers
        expected = simulate(work, layers)
        before = [0, *expected.through[:-1]]
        waited = sum(one - own for one, own in zip(expected.attends, before, strict=True))
        seconds, waiting, _ = said_of(layers, window, read)
        assert seconds == pytest.approx(expected.through[-1] / 100), (layers, window, read)
        assert waiting == pytest.approx(10 * waited), (layers, window, read)
        # The twin: a drive that takes one tick longer is told apart.
        differs += simulate(work, layers, wrong=1).through != expected.through
    assert differs == 150


def test_bubbles_and_computing_are_all_there_is():
    for layers, window, read in cases(100, 7):
        seconds, waiting, _ = said_of(layers, window, read)
        assert seconds == pytest.approx(layers * window / 100 + waiting / 1e3)


def test_where_reading_limits_nothing_is_written_before_the_last_read():
    _, waiting, left = said_of(5, 4, 9, write=1e9)
    assert left == "no time to write"
    assert waiting > 0


def test_slack_is_written_in_whole_quanta_less_what_mixing_loses():
    # A slack of 40 ms in each of three layers.
    assert said_of(3, 8, 4, write=1e8)[2] == "room to write 9.0 MiB"
    assert said_of(3, 8, 4, write=1e8, mixing_loss=0.6)[2] == "room to write 3.0 MiB"
    assert said_of(3, 8, 4, write=1e8, mixing_loss=1.0)[2] == "no time to write"
