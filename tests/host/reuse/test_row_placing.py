# SPDX-License-Identifier: Apache-2.0
"""Rows that wait for a pass: where it breaks off, where none comes, and whose memory they have."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from hillinfer.reuse.row_placing import PlacingRules, RowPlacing

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

    def __init__(self, rows, strikes=(), ends=()):
        self.rows, self.strikes, self.ends = rows, [*strikes], [*ends]
        self.placed = self.ended = 0

    def place(self, threads):
        assert not self.ended
        self.placed += 1
        if self.strikes:
            raise self.strikes.pop()
        return [0] * len(self.rows)

    def is_placed(self, seconds):
        assert not self.ended
        return bool(self.placed)

    def end(self, seconds):
        is_over = self.ends.pop(0) if self.ends else True
        self.ended += is_over
        return is_over


def placing_of(landed, changed=None, **given):
    """Return what places rows while a pass computes, and all that was offered to it."""
    made = []

    def offer(rows, tokens):
        made.append(Offered(rows, **given))
        return made[-1]

    states = SimpleNamespace(offer=offer)
    placing = RowPlacing(states, 64, landed.append, changed or threading.Condition(), 2)
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


class Interrupting(threading.Condition):
    """Strikes whoever leaves it next, once it is armed."""

    def __init__(self):
        super().__init__()
        self.is_armed = False

    def __exit__(self, *given):
        super().__exit__(*given)
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt


class Landed(list):
    """Strikes whoever tells of the first row, once it is noted."""

    def append(self, row):
        super().append(row)
        if len(self) == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("strikes", [KeyboardInterrupt, BrokenOffError])
def test_who_read_rows_places_them_where_the_pass_breaks_off(strikes):
    """They are as good as before: an interrupt of the pass is no failure of a drive."""
    landed, own = [], Row()
    placing, offered = placing_of(landed, strikes=[strikes])
    placing.take([own])
    with pytest.raises(strikes):
        placing.help(0)
    assert not landed
    assert settled(placing, [own]) == [True]
    assert (landed, offered[0].placed) == ([own], 2)


def test_a_pass_that_is_interrupted_before_it_places_anything_gives_rows_back():
    landed, own, changed = [], Row(), Interrupting()
    placing, _ = placing_of(landed, changed)
    placing.take([own])
    changed.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        placing.help(0)
    assert placing.has_waiting(0)
    assert settled(placing, [own]) == [True]
    assert landed == [own]


def test_rows_that_a_pass_has_placed_are_told_of_again_where_telling_was_interrupted():
    landed, rows = Landed(), [Row(), Row()]
    placing, _ = placing_of(landed)
    placing.take(rows)
    with pytest.raises(KeyboardInterrupt):
        placing.help(0)
    assert settled(placing, rows) == [True]
    assert landed == [rows[0], *rows]


def test_rows_that_cannot_be_placed_are_an_error_of_who_read_them():
    landed, own = [], Row()
    placing, _ = placing_of(landed, strikes=[BrokenOffError] * 2)
    placing.take([own])
    with pytest.raises(BrokenOffError):
        placing.help(0)
    assert settled(placing, [own]) == [BrokenOffError]
    closing = threading.Thread(target=placing.close, daemon=True)
    closing.start()
    closing.join(ENOUGH)
    assert not closing.is_alive()
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


def test_rows_wait_for_passes_that_keep_every_core_busy():
    """By the threads of torch, where nothing else is said."""
    states, cores = SimpleNamespace(is_native=True), len(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(cores)
        assert RowPlacing.threads_for(states, 2, PlacingRules()) == cores
        # One layer's memory alone is none that may wait.
        assert RowPlacing.threads_for(states, 1, PlacingRules()) == 0
        assert RowPlacing.threads_for(states, 2, PlacingRules(threads=0)) == 0
        torch.set_num_threads(1)
        assert RowPlacing.threads_for(states, 2, PlacingRules()) == (cores == 1)
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="give 0 or more"):
        PlacingRules(threads=-1)
