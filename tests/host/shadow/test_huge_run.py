# SPDX-License-Identifier: Apache-2.0
"""A run takes the memory of its taken places and no more, in huge pages where they cover them."""

import ctypes
import gc
import itertools
import mmap
import random
import sys
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from resident_memory import PAGES, huge, run_huge, run_taken, taken

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.shadow import arena
from hillinfer.shadow.arena import HugePages, HugeRun, huge_pages_allowed
from hillinfer.system.kept_memory import HUGE_BYTES

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not PAGES.exists(), reason="this system has no huge pages"
)
# No divisor of a huge page: 3.9 of them make one, so places lie across its border.
PLACE = 131 * PAGE_BYTES
# What runs when one changes.
OF_RUNS = (arena.__file__, weakref.__file__)
# Python only tells of an interrupt while it forgets an array, and goes on.
INTERRUPTED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Asked(HugePages):
    """A machine that makes huge pages, and what it was asked; more happens when it is.

    `meanwhile` is called once, with the advice: a run is in the middle of changing then.
    """

    are_allowed = True

    def __init__(self):
        self.advised, self.collapsed = [], []
        self.meanwhile = None

    def advise(self, mapping, advice, start, byte_count):
        super().advise(mapping, advice, start, byte_count)
        self.advised.append((advice, start))
        if self.meanwhile is not None:
            self.meanwhile, once = None, self.meanwhile
            once(advice)

    def collapse(self, address, byte_count):
        self.collapsed.append(address)

    def pages(self, run, first):
        """Return the advice of huge pages that was told, with the number of each page."""
        start = first.ctypes.data - run.addresses.start
        huge_pages = (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE)
        told = [one for one in self.advised if one[0] in huge_pages]
        return [(advice, (at - start) // HUGE_BYTES) for advice, at in told]


def span(run):
    """Return where a run's whole address space begins and ends."""
    return run.addresses.start, run.addresses.stop


def settle():
    """Wait for huge pages that are being made."""
    for one in threading.enumerate():
        if one.name == "hillinfer-huge-page":
            one.join()


def filled(run, count, value=7):
    made = [run.take() for _ in range(count)]
    for one in made:
        one[:] = value
    return made


def test_places_lie_next_to_each_other_from_a_huge_page_on():
    run = HugeRun(PLACE, 5)
    held = filled(run, 5)
    assert run.take() is None
    addresses = [one.ctypes.data for one in held]
    assert addresses[0] % HUGE_BYTES == 0
    assert [b - a for a, b in itertools.pairwise(addresses)] == [PLACE] * 4
    assert {one.nbytes for one in held} == {PLACE}
    start, stop = span(run)
    assert start <= addresses[0]
    assert addresses[-1] + PLACE <= stop


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_that_of_taken_places_whatever_comes_and_goes(seed):
    choose = random.Random(seed)
    run = HugeRun(PLACE, 12)
    held = []
    for _ in range(40):
        if held and choose.random() < 0.4:
            held.pop(choose.randrange(len(held)))
        elif len(held) < 12:
            held += filled(run, 1)
        # A place that goes meanwhile comes back when a huge page is made.
        settle()
        assert run_taken(run) == run.taken_bytes == len(held) * PLACE
    held.clear()
    assert run_taken(run) == 0


def test_one_byte_more_than_the_places_would_show():
    """The twin: a page that nobody took is found."""
    run = HugeRun(PLACE, 40)
    held = filled(run, 4)
    ctypes.memset(held[-1].ctypes.data + PLACE, 1, 1)
    assert run_taken(run) == run.taken_bytes + PAGE_BYTES


def test_huge_pages_come_once_they_are_covered_and_go_with_the_first_place():
    if not huge_pages_allowed():
        pytest.skip("this machine makes no huge pages")
    system = Asked()
    system.collapse = HugePages().collapse
    run = HugeRun(PLACE, 16, system)
    system.advised.clear()
    held = filled(run, 3)
    assert system.advised == []
    assert run_huge(run) == 0
    held += filled(run, 1)
    # Four places cover a huge page and part of the next.
    assert system.pages(run, held[0]) == [(mmap.MADV_HUGEPAGE, 0)]
    settle()
    # The machine may be short of them.
    assert run_huge(run) in (0, HUGE_BYTES)
    held += filled(run, 12)
    assert [page for _, page in system.pages(run, held[0])] == [0, 1, 2, 3]
    settle()
    system.advised.clear()
    held.pop(3)
    asked = system.pages(run, held[0])
    assert asked == [(mmap.MADV_NOHUGEPAGE, 0), (mmap.MADV_NOHUGEPAGE, 1)]
    # It lay in both.
    start = held[0].ctypes.data
    assert huge(start, start + 2 * HUGE_BYTES) == 0
    assert run_taken(run) == run.taken_bytes == 15 * PLACE
    assert all((one == 7).all() for one in held)


class Busy(Asked):
    """A machine that makes no second huge page before it is let make the first."""

    def __init__(self):
        super().__init__()
        self.begun, self.let = threading.Event(), threading.Event()

    def collapse(self, address, byte_count):
        super().collapse(address, byte_count)
        self.begun.set()
        assert self.let.wait(60)


def test_a_huge_page_of_which_a_place_went_is_not_made():
    system = Busy()
    other, run = HugeRun(PLACE, 16, system), HugeRun(PLACE, 16, system)
    others = filled(other, 4)
    assert system.begun.wait(60)
    # One at a time is made: this one is next.
    held = filled(run, 4)
    del held[1]
    system.let.set()
    settle()
    assert system.collapsed == [others[0].ctypes.data]
    assert run_taken(run) == run.taken_bytes == 3 * PLACE


def test_what_was_written_stays_when_a_huge_page_is_made_of_it():
    run = HugeRun(PLACE, 8)
    held = [run.take() for _ in range(3)]
    generator = np.random.default_rng(0)
    expected = [generator.integers(0, 256, PLACE, dtype=np.uint8) for _ in held]
    for one, own in zip(held, expected, strict=True):
        one[:] = own
    held.append(run.take())
    settle()
    for one, own in zip(held, [*expected, np.zeros(PLACE, np.uint8)], strict=True):
        np.testing.assert_array_equal(one, own)


def test_a_place_comes_back_as_zeros_and_only_when_nobody_looks_at_it():
    run = HugeRun(PLACE, 3)
    held = filled(run, 3)
    address, view = held[1].ctypes.data, held[1][5:9].reshape(2, 2)
    del held[1]
    assert run.take() is None, "a view is a user"
    assert (view == 7).all()
    assert run_taken(run) == 3 * PLACE
    del view
    assert run_taken(run) == 2 * PLACE
    again = run.take()
    assert again.ctypes.data == address
    assert not again.any()


def test_the_first_free_place_is_taken_first():
    run = HugeRun(PLACE, 6)
    held = dict(enumerate(filled(run, 6)))
    addresses = [one.ctypes.data for one in held.values()]
    for place in (4, 1, 3):
        del held[place]
    assert [run.take().ctypes.data for _ in range(1)] == [addresses[1]]
    held[1] = run.take()
    assert held[1].ctypes.data == addresses[1]
    held[3] = run.take()
    assert held[3].ctypes.data == addresses[3]


def test_arrays_outlive_their_run():
    run = HugeRun(PLACE, 3)
    held = filled(run, 2)
    start, stop = span(run)
    del run
    gc.collect()
    assert (held[0] == 7).all()
    held[1][:] = 9
    assert taken(start, stop) == 2 * PLACE
    del held[1]
    assert taken(start, stop) == PLACE
    held.clear()
    gc.collect()
    assert taken(start, stop) == 0


def test_a_place_that_goes_while_the_run_changes_is_not_forgotten():
    """A collection may run anywhere, in the middle of taking another place, too."""
    system = Asked()
    run = HugeRun(PLACE, 5, system)
    held, taken_meanwhile = filled(run, 3), []

    def goes(_):
        held.pop(0)
        taken_meanwhile.append(run.taken_bytes)

    # The fourth place covers a huge page, which is asked for.
    system.meanwhile = goes
    held += filled(run, 1)
    assert taken_meanwhile == [4 * PLACE]
    settle()
    again = run.take()
    assert again.ctypes.data < held[0].ctypes.data
    assert run_taken(run) == 3 * PLACE, "nothing of it was touched yet"
    assert not again.any()


class Moment:
    """A moment of a run's code, by its number, at which something more happens.

    Ctrl-C and a collection may come whenever a function begins, and when one of C came back.
    """

    def __init__(self, number, act):
        self.left, self._act = number, act

    def __call__(self, frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename in OF_RUNS:
            self.left -= 1
            if self.left == -1:
                self._act()

    @property
    def has_come(self):
        return self.left < 0

    @contextmanager
    def awaited(self):
        """Count moments in the block of code that this encloses."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def each_moment(act):
    """Yield one moment after the other, until one did not come."""
    for number in itertools.count():
        moment = Moment(number, act)
        yield moment
        if not moment.has_come:
            # What is looked for here comes behind some calls.
            assert number > 3
            return


def interrupt():
    raise KeyboardInterrupt


def test_a_place_that_goes_at_any_moment_of_taking_another_is_not_forgotten():
    """When all seem taken, and nobody was told so yet, too."""
    held, refused = [], 0
    for moment in each_moment(lambda: held.pop(0)):
        run = HugeRun(PLACE, 2)
        held[:] = filled(run, 2)
        with moment.awaited():
            memory = run.take()
        others = 2 - moment.has_come
        assert run.taken_bytes == (others + (memory is not None)) * PLACE
        assert memory is not None or run_taken(run) == run.taken_bytes
        refused += moment.has_come and memory is None
    assert refused


@INTERRUPTED
@pytest.mark.parametrize("spare", [True, False], ids=["traceback kept", "traceback gone"])
def test_no_place_is_given_twice_after_an_interrupt(spare):
    for moment in each_moment(interrupt):
        run = HugeRun(PLACE, 2)
        told = ended_by(moment, run.take)
        if not spare:
            del told
        first = run.take()
        first[:] = 7
        if spare:
            # What it kept was over the place that somebody else has by now.
            del told
        gc.collect()
        second = run.take()
        assert second is not None, "a place was lost"
        assert second.ctypes.data != first.ctypes.data
        assert run.take() is None
        assert (first == 7).all()


def ended_by(moment, work):
    """Do some work, and return the interrupt that ended it, or None."""
    try:
        with moment.awaited():
            work()
    except KeyboardInterrupt as told:
        return told
    return None


class Later(Asked):
    """A machine that has not got to making a huge page: nobody else clears what came back."""

    def in_background(self, work):
        pass


def test_an_interrupt_while_a_place_comes_back_loses_none():
    system = Later()
    run = HugeRun(PLACE, 4, system)
    held = filled(run, 3)

    def interrupt(advice):
        system.meanwhile = interrupt
        if advice == mmap.MADV_DONTNEED:
            system.meanwhile = None
            raise KeyboardInterrupt

    def goes(_):
        del held[0]
        system.meanwhile = interrupt

    # The fourth place covers a huge page, which is asked for; the first comes back after that.
    system.meanwhile = goes
    with pytest.raises(KeyboardInterrupt):
        run.take()
    settle()
    again = run.take()
    assert again is not None, "a place was lost"
    assert not again.any()
    assert again.ctypes.data < held[0].ctypes.data
    last = run.take()
    assert last is not None, "what was being taken was lost"
    assert run.take() is None


@INTERRUPTED
def test_an_interrupt_when_an_array_goes_loses_no_place():
    """Whatever Python code is called then, Ctrl-C may come before its first line."""
    for moment in each_moment(interrupt):
        run = HugeRun(PLACE, 2)
        held = filled(run, 2)
        with moment.awaited():
            del held[0]
        again = run.take()
        assert again is not None, "a place was lost"
        assert not again.any()


@INTERRUPTED
def test_an_interrupt_leaves_no_run_locked():
    """Nor does one that comes when places are cleared that went meanwhile."""
    for moment in each_moment(interrupt):
        run = HugeRun(PLACE, 2)
        held = filled(run, 2)

        def goes(held=held, moment=moment):
            held.pop()
            sys.setprofile(moment)

        # The second moment of its work is in the middle of changing the run.
        ended_by(Moment(1, goes), run.end_coming)
        assert is_free(run), "it waits for ever"


def is_free(run):
    """Say whether another thread gets a place of a run."""
    made = []
    other = threading.Thread(target=lambda: made.append(run.take()), daemon=True)
    other.start()
    other.join(5)
    return len(made) == 1


def test_one_huge_page_is_made_at_a_time():
    """While it is made its memory is there twice."""
    together = threading.Barrier(2)
    alone = []

    class Alone(Asked):
        def collapse(self, address, byte_count):
            try:
                together.wait(0.2)
            except threading.BrokenBarrierError:
                alone.append(True)

    runs = [HugeRun(PLACE, 4, Alone()) for _ in range(2)]
    held = [filled(run, 4) for run in runs]
    settle()
    assert len(alone) == len(held)


def test_threads_never_share_a_place():
    # Six for each thread, and the one that it let go of last.
    run = HugeRun(PLACE, 28)
    wrong = []

    def work(value):
        choose, own = random.Random(value), []
        for _ in range(200):
            if len(own) < 6 and choose.random() < 0.6:
                one = run.take()
                if one.any():
                    wrong.append("not zeros")
                one[:] = value
                own.append(one)
            elif own:
                one = own.pop(choose.randrange(len(own)))
                if (one != value).any():
                    wrong.append("somebody else's")

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3, 4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    settle()
    assert wrong == []
    assert run_taken(run) == run.taken_bytes == 0


class Refusing(Asked):
    """A machine that refuses some advice."""

    refused = ()

    def advise(self, mapping, advice, start, byte_count):
        super().advise(mapping, advice, start, byte_count)
        if advice in self.refused:
            raise OSError("refused")


def test_where_huge_pages_are_refused_the_places_stay():
    system = Refusing()
    run = HugeRun(PLACE, 8, system)
    system.refused = (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE)
    held = filled(run, 8)
    settle()
    assert run_taken(run) == 8 * PLACE
    assert all((one == 7).all() for one in held)


class Threadless(Asked):
    """A machine that has no thread left."""

    def in_background(self, work):
        raise RuntimeError("can't start new thread")


def test_where_no_thread_starts_the_places_stay():
    """Then the system makes huge pages when it gets to it."""
    run = HugeRun(PLACE, 8, Threadless())
    held = filled(run, 8)
    assert run_taken(run) == 8 * PLACE
    assert all((one == 7).all() for one in held)


def test_memory_that_cannot_be_given_back_is_zeros_again():
    """As in a process that locks all of its memory."""
    system = Locked()
    run = HugeRun(PLACE, 2, system)
    held = filled(run, 2)
    system.is_locked = True
    del held[0]
    system.is_locked = False
    again = run.take()
    assert not again.any()
    assert (held[0] == 7).all()


class Locked(Asked):
    """A machine that takes no memory back while it is locked."""

    is_locked = False

    def advise(self, mapping, advice, start, byte_count):
        if self.is_locked:
            raise OSError("locked")
        super().advise(mapping, advice, start, byte_count)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[always] madvise never", True), ("always [madvise] never", True), ("always [never]", False)],
)
def test_what_the_machine_allows(tmp_path, text, expected):
    switch = tmp_path / "enabled"
    assert not huge_pages_allowed(switch)
    switch.write_text(text)
    assert huge_pages_allowed(switch) is expected


def test_nothing_is_asked_where_the_machine_makes_none():
    system = Asked()
    system.are_allowed = False
    run = HugeRun(PLACE, 8, system)
    system.advised.clear()
    held = filled(run, 8)
    assert system.advised == []
    assert len(held) == 8
    settle()
    assert system.collapsed == []


@pytest.mark.parametrize(("place_bytes", "places"), [(0, 1), (100, 1), (PAGE_BYTES, 0)])
def test_what_is_no_run_is_refused(place_bytes, places):
    with pytest.raises(ValueError, match="whole pages"):
        HugeRun(place_bytes, places)
