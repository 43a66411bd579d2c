# SPDX-License-Identifier: Apache-2.0
"""Shadows that come one after another come in huge pages; what does not come takes no memory."""

import mmap

import pytest
from resident_memory import PAGES, run_taken

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.shadow.arena import ComingShadows, HugePages, HugeRun, ShadowArena
from hillinfer.system.kept_memory import HUGE_BYTES

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not PAGES.exists(), reason="this system has no huge pages"
)
# No divisor of a huge page: 3.9 of them make one.
PLACE = 131 * PAGE_BYTES
COMING = 8


class Asked(HugePages):
    """A machine that makes huge pages, and where it was asked for them."""

    are_allowed = True

    def __init__(self):
        self.asked, self.collapsed = [], []

    def advise(self, mapping, advice, start, byte_count):
        super().advise(mapping, advice, start, byte_count)
        if advice == mmap.MADV_HUGEPAGE:
            self.asked.append(start)

    def collapse(self, address, byte_count):
        self.collapsed.append(address)

    def in_background(self, work):
        work()


@pytest.fixture
def machine():
    return Asked()


@pytest.fixture
def arena(machine):
    return ShadowArena(PLACE, 40 * PLACE, lambda *sizes: HugeRun(*sizes, machine))


def test_huge_pages_are_asked_for_before_a_place_in_them_is_written_to(machine, arena):
    coming = ComingShadows()
    with coming.expected(COMING):
        coming.tell([arena])
        held = [arena.take()]
        assert len(machine.asked) == 1
        held[0][:] = 7
        held += [arena.take() for _ in range(COMING - 1)]
    assert len(set(machine.asked)) == len(machine.asked) == COMING * PLACE // HUGE_BYTES
    # Nothing is made of small pages any more, and nothing is there that no place covers.
    assert not machine.collapsed
    (run,) = arena.runs
    assert run_taken(run) <= COMING * PLACE
    assert (held[0] == 7).all()
    assert not any(one.any() for one in held[1:])


def test_what_was_expected_and_does_not_come_takes_no_memory(machine, arena):
    coming = ComingShadows()
    with coming.expected(COMING):
        coming.tell([arena])
        first = arena.take()
        first[:] = 7
    (run,) = arena.runs
    assert run_taken(run) == PLACE
    assert (first == 7).all()
    # Nobody expects anything now: a huge page is asked for when places cover it, and made then.
    held = [arena.take() for _ in range(2)]
    assert len(machine.asked) == 1
    assert not any(one.any() for one in held)
    held.append(arena.take())
    assert len(machine.asked) == 2
    assert len(machine.collapsed) == 1


def test_another_s_places_among_them_leave_no_page_uncovered(machine, arena):
    coming = ComingShadows()
    with coming.expected(COMING):
        coming.tell([arena])
        held = [arena.take() for _ in range(COMING)]
        for one in held:
            one[:] = 7
        # Whoever else has the arena gives a place back.
        del held[1], one
    (run,) = arena.runs
    assert run_taken(run) == (COMING - 1) * PLACE
    assert all((one == 7).all() for one in held)
