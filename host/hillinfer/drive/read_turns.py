# SPDX-License-Identifier: Apache-2.0
"""A priority lock on the drive: demand reads, awaited writes, prefetch, then write-back."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

_Result = TypeVar("_Result")

# A write of this size is as fast as a longer one, and a read has one beside it at most.
QUANTUM_BYTES = 1 << 20
# Writes in slack look again this often where nothing wakes them: windows open by the clock.
_LOOK_SECONDS = 0.005

# --- Who goes first ---


class IOClass(IntEnum):
    """What a transfer is for, the most urgent first."""

    DEMAND = 0
    """Reads that somebody waits for."""
    SPILL = 1
    """Writes that somebody waits for: memory is full, or what is written is wanted back."""
    AHEAD = 2
    """Reads of layers to come, the one that is wanted first before the others."""
    SLACK = 3
    """Writes that nobody waits for: write-back, publishing, collecting."""

    @property
    def is_write(self) -> bool:
        """Whether it brings bytes to the drive."""
        return self in (IOClass.SPILL, IOClass.SLACK)


class Mixing(Protocol):
    """Which transfers a drive makes at once."""

    defers_writes: bool
    """Whether writes that nobody waits for stay away between the reads of one who has several."""

    def may_start(self, own: IOClass, running: Sequence[IOClass]) -> bool:
        """Return whether a transfer may begin beside those that are under way."""


class Apart:
    """For drives that lose by mixing: a write begins alone (Tutti, section 3.3).

    A read does not wait for the end of one that is under way: that is a quantum at most, and where
    the drive has a hiccup it is long.

    Parameters
    ----------
    reads
        Most turns of readers at a time.
    """

    defers_writes = True

    def __init__(self, reads: int = 1) -> None:
        self._reads = reads

    def may_start(self, own: IOClass, running: Sequence[IOClass]) -> bool:
        """Return whether nothing is under way, or for a read, not too many others."""
        if own.is_write:
            return not running
        return sum(not one.is_write for one in running) < self._reads


class Beside:
    """For drives that do not: one write at a time beside the reads; parameters as in `Apart`."""

    defers_writes = False

    def __init__(self, reads: int = 1) -> None:
        self._reads = reads

    def may_start(self, own: IOClass, running: Sequence[IOClass]) -> bool:
        """Return whether fewer of its kind are under way than may be."""
        alike = sum(one.is_write == own.is_write for one in running)
        return alike < (1 if own.is_write else self._reads)


class WithoutTurns(Protocol):
    """Reads ahead without taking turns, and gives way to reads on demand all the same."""

    def hold(self) -> None:
        """Stand still, behind what is under way, until told to go on or somebody waits for it."""

    def go_on(self) -> None:
        """Go on reading."""


class Window(Protocol):
    """Says whether a write that nobody waits for ends before reads are wanted again."""

    def is_open(self, byte_count: int) -> bool:
        """Return whether so many bytes can be written now."""


class AlwaysOpen:
    """A `Window` of those who know nothing of what comes."""

    def is_open(self, byte_count: int) -> bool:
        """Return true."""
        return True


@dataclass(frozen=True)
class Patience:
    """How long writes wait before they count as more urgent, so that none waits for ever.

    Parameters
    ----------
    slack_seconds
        Until one that nobody waits for is a spill.
    spill_seconds
        From then on, or where it was one from the beginning, until it goes before later reads on
        demand.
    """

    slack_seconds: float = 0.5
    spill_seconds: float = 0.1


# --- Turns ---


@dataclass(eq=False)
class _Turn:
    """A transfer that waits or is under way.

    Parameters
    ----------
    kind, deadline, byte_count
        As it was asked for.
    number, since
        In which order they came, and when, in seconds of the clock.
    is_running, is_over
        Where it is in its life. It is over by this alone, without a lock, because an interrupt may
        come anywhere.
    """

    kind: IOClass
    deadline: float
    byte_count: int
    number: int
    since: float
    is_running: bool = False
    is_over: bool = False


@dataclass
class TurnCounts:
    """What became of writes, running totals.

    Parameters
    ----------
    slack_bytes, spilled_bytes
        Written while nobody else wanted the drive, and because somebody waited.
    deferred_writes, deferred_seconds
        Writes that were put off, and for how long in all.
    """

    slack_bytes: int = 0
    spilled_bytes: int = 0
    deferred_writes: int = 0
    deferred_seconds: float = 0.0


class ReadTurns:
    """A lock that the most urgent transfer gets first: four classes, reads ahead by deadline.

    Attention waits for what it demands, while what is read ahead has until the next layer, and what
    is written has until memory is full. No transfer is broken off: who reads ahead or writes takes
    a turn for each of many pieces.

    Who reads on demand may be interrupted by Ctrl-C anywhere; a turn ends, and others are told, all
    the same. So these are no context managers: between the frames of one, an interrupt would leave
    the turn taken for as long as its traceback lives. Reads ahead and writes are other threads'.

    Parameters
    ----------
    changed
        What those wait for who have no turn yet; one of its own where None.
    mixing
        What may be under way at once; reads are one at a time, and writes alone, where None.

    Attributes
    ----------
    window
        When writes that nobody waits for may begin; anybody may replace it.
    mixing
        As given; anybody may replace it, as by what was measured of the drive.
    demands
        Who has several reads on demand, each by a mark of its own; to be looked at only.
    without_turns
        Who reads ahead and takes none. Writes do not see these reads.
    """

    def __init__(
        self,
        changed: threading.Condition | None = None,
        mixing: Mixing | None = None,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed = threading.Condition() if changed is None else changed
        self.mixing: Mixing = mixing or Apart()
        self.window: Window = AlwaysOpen()
        self.without_turns: list[WithoutTurns] = []
        self._patience = patience or Patience()
        self._clock = clock
        self._turns: list[_Turn] = []
        self._numbers = itertools.count()
        self.demands: list[object] = []
        # Who waits for writes; each by a mark of its own.
        self._hurries: set[object] = set()
        self._counts = TurnCounts()

    def demand(self) -> None:
        """Let nobody read ahead until `satisfy`, between the turns of one who has several."""
        mark = object()
        try:
            with self._changed:
                self.demands.append(mark)
            self._hold_others()
        except BaseException:
            if mark in self.demands:
                self.demands.remove(mark)
            self._hold_others()
            self.wake()
            raise

    def satisfy(self) -> None:
        """Take a demand back."""
        with self._changed:
            self.demands.pop()
            self._changed.notify_all()
        self._hold_others()

    def forget_demands(self) -> None:
        """Take back what an interrupt left, and let all look again; nobody reads on demand."""
        self.demands.clear()
        self._hold_others()
        self.wake()

    def on_demand(self, read: Callable[[], _Result]) -> _Result:
        """Wait for the end of the turn under way, at most, and read in the next one."""
        turn = self._turn(IOClass.DEMAND)
        try:
            with self._changed:
                self._turns.append(turn)
                self._changed.wait_for(lambda: self._may_start(turn))
                turn.is_running = True
            return read()
        finally:
            turn.is_over = True
            # Also where it never came: others may have looked while it was wanted.
            self.wake()

    @contextmanager
    def ahead(self, deadline: float = math.inf) -> Iterator[None]:
        """Wait until nobody reads or wants to read on demand, and have a turn.

        Parameters
        ----------
        deadline
            When it is wanted, in seconds of the clock; the earliest goes first.
        """
        turn = self._turn(IOClass.AHEAD, deadline)
        try:
            with self._changed:
                self._turns.append(turn)
                self._changed.wait_for(lambda: self._may_start(turn))
                turn.is_running = True
            yield
        finally:
            turn.is_over = True
            self.wake()

    @contextmanager
    def writing(self, byte_count: int, kind: IOClass = IOClass.SLACK) -> Iterator[None]:
        """Wait until the drive has time for a write, and have a turn.

        Parameters
        ----------
        byte_count
            What is written, a quantum at most.
        kind
            SLACK, which becomes SPILL while anybody waits for writes, or SPILL.
        """
        turn = self._turn(kind, byte_count=byte_count)
        try:
            with self._changed:
                self._turns.append(turn)
                if not self._may_start(turn):
                    self._counts.deferred_writes += 1
                    while not self._changed.wait_for(lambda: self._may_start(turn), _LOOK_SECONDS):
                        pass
                    self._counts.deferred_seconds += self._clock() - turn.since
                turn.is_running = True
                if self._urgency(turn) is IOClass.SLACK:
                    self._counts.slack_bytes += byte_count
                else:
                    self._counts.spilled_bytes += byte_count
            yield
        finally:
            turn.is_over = True
            self.wake()

    def hurry(self, wait: Callable[[], _Result]) -> _Result:
        """Return what a call returns that waits for writes: they are spills meanwhile."""
        mark = object()
        try:
            self._hurries.add(mark)
            self.wake()
            return wait()
        finally:
            self._hurries.discard(mark)

    def waiting(self, kind: IOClass) -> int:
        """Return how many of a class wait now."""
        with self._changed:
            return sum(one.kind is kind for one in self._turns if _waits(one))

    def counts(self) -> dict[str, int | float]:
        """Return what became of writes so far, by name."""
        with self._changed:
            return asdict(self._counts)

    def wake(self) -> None:
        """Let all who wait look again."""
        with self._changed:
            self._changed.notify_all()

    # --- inside ----------------------------------------------------------------------------

    def _hold_others(self) -> None:
        """Hold those who take no turns while somebody demands; else let them go on."""
        for one in self.without_turns:
            if self.demands:
                one.hold()
            else:
                one.go_on()

    def _turn(self, kind: IOClass, deadline: float = math.inf, byte_count: int = 0) -> _Turn:
        return _Turn(kind, deadline, byte_count, next(self._numbers), self._clock())

    def _urgency(self, turn: _Turn) -> IOClass:
        """Return the class of a turn by now."""
        kind, waited = turn.kind, self._clock() - turn.since
        if kind is IOClass.SLACK:
            if not self._hurries and waited < self._patience.slack_seconds:
                return kind
            kind, waited = IOClass.SPILL, waited - self._patience.slack_seconds
        if kind is IOClass.SPILL and waited >= self._patience.spill_seconds:
            return IOClass.DEMAND
        return kind

    def _rank(self, turn: _Turn) -> tuple[IOClass, float, int]:
        urgency = self._urgency(turn)
        return urgency, turn.deadline if urgency is IOClass.AHEAD else 0.0, turn.number

    def _may_start(self, turn: _Turn) -> bool:
        """Return whether it is a turn's turn."""
        self._turns = [one for one in self._turns if not one.is_over]
        running = [one.kind for one in self._turns if one.is_running]
        if not self.mixing.may_start(turn.kind, running):
            return False
        rank = self._rank(turn)
        if rank[0] is IOClass.AHEAD and self.demands:
            return False
        if rank[0] is IOClass.SLACK:
            if self.mixing.defers_writes and self.demands:
                return False
            if not self.window.is_open(turn.byte_count):
                return False
        return all(self._rank(one) >= rank for one in self._turns if _waits(one))


def _waits(turn: _Turn) -> bool:
    return not turn.is_running and not turn.is_over
