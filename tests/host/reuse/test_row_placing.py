# SPDX-License-Identifier: Apache-2.0
"""Rows that wait for a pass: where it breaks off, where none comes, and whose memory they have."""

import threading
from types import SimpleNamespace

import pytest

from hillinfer.reuse.row_placing import RowPlacing

ENOUGH = 20


class BrokenOffError(Exception):
    pass


class Row:
    def __init__(self, layer=0):
        self.layer, self.is_checked = layer, False

    def check(self, found):
        self.is_checked = True


class Offered:
    """Rows that no core was left for, and what became of them."""

    def __init__(self, rows, strikes=None, ends=()):
        self.rows, self.strikes, self.ends = rows, strikes, [*ends]
        self.placed = self.ended = 0

    def place(self, threads):
        assert not self.ended
        self.placed += 1
        if self.strikes is not None:
            raise self.strikes
        return [0] * len(self.rows)

    def is_placed(self, seconds):
        assert not self.ended
        return bool(self.placed)

    def end(self, seconds):
        is_over = self.ends.pop(0) if self.ends else True
        self.ended += is_over
        return is_over


def placing_of(landed, **given):
    """Return what places rows while a pass computes, and all that was offered to it."""
    made = []

    def offer(rows, tokens):
        made.append(Offered(rows, **given))
        return made[-1]

    states = SimpleNamespace(offer=offer)
    placing = RowPlacing(states, 64, landed.append, threading.Condition(), 2)
    placing.let_wait()
    return placing, made


def settled(placing, rows):
    """Settle rows in a thread of their own; return what came of it, and nothing where it waits."""
    found = []

    def settle():
        try:
            found.append(placing.settle(rows))
        except Exception as error:
            found.append(type(error))

    reader = threading.Thread(target=settle, daemon=True)
    reader.start()
    reader.join(ENOUGH)
    return found


@pytest.mark.parametrize(
    ("strikes", "told"), [(KeyboardInterrupt, InterruptedError), (BrokenOffError, BrokenOffError)]
)
def test_who_read_rows_learns_that_the_pass_broke_off(strikes, told):
    """A process that ends waits for the thread that reads, which must not wait for ever."""
    landed, own = [], Row()
    placing, _ = placing_of(landed, strikes=strikes)
    placing.take([own])
    with pytest.raises(strikes):
        placing.help(0)
    assert settled(placing, [own]) == [told]
    assert not landed


def test_rows_that_no_pass_comes_for_are_placed_in_the_end():
    landed, own = [], Row()
    placing, made = placing_of(landed)
    placing.take([own])
    assert settled(placing, [own]) == [True]
    (offered,) = made
    assert (offered.placed, offered.ended) == (1, 1)
    assert landed == [own]


def test_a_pass_places_what_it_came_for_and_no_later_layer():
    landed, rows = [], [Row(layer) for layer in range(3)]
    placing, made = placing_of(landed)
    for own in rows:
        placing.take([own])
    assert placing.has_waiting(0)
    placing.help(1)
    assert landed == rows[:2]
    assert [one.placed for one in made] == [1, 1, 0]
    assert not placing.has_waiting(1)
    assert placing.has_waiting(2)


def test_rows_that_nobody_settles_are_placed_by_nobody():
    landed, own = [], Row()
    placing, made = placing_of(landed)
    placing.take([own])
    placing.close()
    assert not placing.has_waiting(0)
    placing.help(0)
    (offered,) = made
    assert (offered.placed, offered.ended) == (0, 1)
    assert not landed


def test_memory_stays_whose_rows_somebody_has_begun():
    landed, own = [], Row()
    placing, made = placing_of(landed, ends=[False, False])
    placing.take([own])
    placing.help(0)
    assert settled(placing, [own]) == [False]
    (offered,) = made
    assert not offered.ended
    placing.close()
    assert offered.ended == 1
