# SPDX-License-Identifier: Apache-2.0
"""Options of one document on its upper hull, and many documents' steps merged by slope.

Of each document only options matter that lie on the upper hull of utility over bytes; from one to
the next the gain per byte falls. Taking steps of all documents by their gain per byte until a
budget is full is the best there is but for the last step (Dyer 1984, Zemel 1984).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# --- One document ---


@dataclass(frozen=True)
class Point:
    """An option as its hull sees it.

    Parameters
    ----------
    number
        Of the option.
    byte_count
        What it takes of the budget.
    value
        What a use is worth, in seconds.
    """

    number: int
    byte_count: int
    value: float


def upper_hull(points: Sequence[Point], base: float) -> list[Point]:
    """Return the points on the upper hull over (0 bytes, base), fewest bytes first.

    Parameters
    ----------
    points
        In any order.
    base
        What a use is worth that takes nothing of the budget.
    """
    hull: list[Point] = []
    for point in sorted(points, key=lambda one: (one.byte_count, -one.value)):
        if point.value <= (hull[-1].value if hull else base):
            continue
        while hull and _slope(_before(hull, base), hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _before(hull: Sequence[Point], base: float) -> Point:
    return hull[-2] if len(hull) > 1 else Point(-1, 0, base)


def _slope(one: Point, other: Point) -> float:
    taken = other.byte_count - one.byte_count
    return (other.value - one.value) / taken if taken else float("inf")


def _level(hull: Sequence[Point], old: Point) -> int:
    """Return how many points of a hull take no more than an older point does."""
    return sum(point.byte_count <= old.byte_count for point in hull)


# --- Many documents ---


@dataclass
class Member:
    """A document on its way up its hull.

    Parameters
    ----------
    weight
        How often it is used.
    points
        All there are, in any order.
    hull
        Those on the hull, fewest bytes first.
    base
        What a use is worth below the first of them.
    level
        How many points of the hull it has climbed; 0 below the first.
    settled
        How many of them it had climbed when that was kept last.
    filler
        A point beside the hull that it has for now, because it fills what is left.
    version
        Grows with every change, so that older entries of heaps are known as such.
    """

    weight: float
    points: Sequence[Point]
    hull: Sequence[Point]
    base: float
    level: int = 0
    settled: int = 0
    filler: Point | None = None
    version: int = 0

    @property
    def climbed(self) -> Point:
        """Where it is on its hull; a point of no option below the first."""
        return self.hull[self.level - 1] if self.level else Point(-1, 0, self.base)

    @property
    def point(self) -> Point | None:
        """Where it is; None below the first point."""
        return self.filler or (self.climbed if self.level else None)

    def fillers(self) -> list[Point]:
        """Return points between where it is and its next step, best first."""
        below, above = self.climbed, self.hull[self.level]
        better: list[Point] = []
        for point in sorted(self.points, key=lambda one: (one.byte_count, -one.value)):
            if point.byte_count >= above.byte_count:
                break
            if point.byte_count > below.byte_count and point.value > below.value:
                below = point
                better.append(point)
        return better[::-1]

    def step(self, level: int) -> tuple[int, float]:
        """Return the bytes and the utility that the step up to a level takes and gains."""
        upper = self.hull[level - 1]
        lower = self.hull[level - 2] if level > 1 else Point(-1, 0, self.base)
        return upper.byte_count - lower.byte_count, self.weight * (upper.value - lower.value)

    def slope(self, level: int) -> float:
        """Return the gain per byte of the step up to a level."""
        taken, gained = self.step(level)
        return gained / taken if taken else float("inf")


_Entry = tuple[float, str, int]
# How many steps that do not fit are passed over for smaller ones behind them.
_PASSED_OVER = 16
# How many steps may be given up for one.
_MOST_GIVEN_UP = 64


@dataclass
class SlopeMerge:
    """Documents that share one budget, each at some level of its hull.

    Two heaps hold what would be given up first and what would be taken next, one entry each for a
    document. An event costs O(log n) for each step that it makes.

    Parameters
    ----------
    hysteresis
        A step is exchanged for steps that others have had before only where it gains more by this
        part.

    Attributes
    ----------
    used
        Bytes taken.
    moved
        Names of those that changed their level since this was last cleared.
    looked_at
        Entries taken from heaps so far.
    wanted
        The gain per byte of the best step that found no room when last asked for; 0 for none.
    """

    hysteresis: float = 0.0
    used: int = 0
    moved: set[str] = field(default_factory=set)
    looked_at: int = 0
    wanted: float = 0.0
    _members: dict[str, Member] = field(default_factory=dict)
    _up: list[_Entry] = field(default_factory=list)
    _down: list[_Entry] = field(default_factory=list)
    _climbers: set[str] = field(default_factory=set)
    _filled: list[str] = field(default_factory=list)
    _versions: int = 0

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def point(self, name: str) -> Point | None:
        """Return where a document is; None below its first point, or where it is not there."""
        member = self._members.get(name)
        return None if member is None else member.point

    def put(self, name: str, weight: float, points: Sequence[Point], base: float) -> None:
        """Take in a document or what is newly known of it.

        It stays at the option where it is, or goes down to the next below that takes no more.

        Parameters
        ----------
        name, weight
            Of the document.
        points
            What it may take of this budget, in any order.
        base
            What a use is worth that takes nothing of it.
        """
        old = self._members.get(name)
        before = self.point(name)
        hull = upper_hull(points, base)
        level = settled = 0
        if old is not None and before is not None:
            level = _level(hull, before)
            settled = _level(hull, old.hull[old.settled - 1]) if old.settled else 0
        self.remove(name)
        member = Member(weight, points, hull, base, level, settled)
        self._members[name] = member
        self.used += member.climbed.byte_count
        if (member.point and member.point.number) != (before and before.number):
            self.moved.add(name)
        self._enter(name, member)

    def remove(self, name: str) -> None:
        """Forget a document, if it is there."""
        member = self._members.pop(name, None)
        if member is not None and member.point is not None:
            self.used -= member.point.byte_count

    def settle(self, budget: int) -> None:
        """Give up steps until the budget is kept, then take what fits or gains enough."""
        self._clear_fillers()
        while self.used > budget:
            entry = self._top(self._down)
            if entry is None:
                break
            heapq.heappop(self._down)
            self._climb(entry[1], -1)
        passed: list[_Entry] = []
        self.wanted = 0.0
        while len(passed) < _PASSED_OVER:
            entry = self._top(self._up)
            if entry is None:
                break
            heapq.heappop(self._up)
            slope, name, _ = entry
            member = self._members[name]
            taken, gained = member.step(member.level + 1)
            given = self._given_up(self.used + taken - budget, gained, name)
            if given is None:
                self.wanted = max(self.wanted, -slope)
                passed.append(entry)
                continue
            self._give_up(given)
            self._climb(name, 1)
        for entry in passed:
            heapq.heappush(self._up, entry)
        for _, name, _ in passed:
            self._fill(name, budget)

    def keep(self) -> None:
        """Take what documents have now for what they had before; hysteresis begins from here."""
        for name in self._climbers & self._members.keys():
            self._members[name].settled = self._members[name].level
        self._climbers.clear()

    # --- inside ----------------------------------------------------------------------------

    def _given_up(self, needed: int, gained: float, name: str) -> dict[str, int] | None:
        """Return how many last steps of whom make so much room and lose enough less, or None.

        Steps that gain more per byte may go, too, where the larger step then fills what was free.
        """
        taken: list[_Entry] = []
        below: list[_Entry] = []
        steps: list[tuple[str, int, float]] = []
        given_up: dict[str, int] = {}
        lost = 0.0
        while needed > 0 and lost < 2 * gained and len(steps) < _MOST_GIVEN_UP:
            entry = self._top(self._down)
            if below and (entry is None or below[0] < entry):
                entry = heapq.heappop(below)
            elif entry is None:
                break
            else:
                taken.append(heapq.heappop(self._down))
            member = self._members[entry[1]]
            if entry[1] == name or member.filler is not None:
                continue
            given_up[entry[1]] = given_up.get(entry[1], 0) + 1
            level = member.level - given_up[entry[1]]
            byte_count, loss = member.step(level + 1)
            loss *= 1 + self.hysteresis if level < member.settled else 1
            needed -= byte_count
            lost += loss
            steps.append((entry[1], byte_count, loss))
            if level:
                heapq.heappush(below, (member.slope(level), entry[1], member.version))
        for entry in taken:
            heapq.heappush(self._down, entry)
        # The last ones may have made the first ones needless: dearest first, lowest steps first.
        staying: set[str] = set()
        for one, byte_count, loss in reversed(steps):
            if needed + byte_count <= 0 and one not in staying:
                given_up[one] -= 1
                needed += byte_count
                lost -= loss
            else:
                staying.add(one)
        return given_up if needed <= 0 and (not steps or lost < gained) else None

    def _give_up(self, steps: Mapping[str, int]) -> None:
        for name, count in steps.items():
            if count:
                self._climb(name, -count)

    def _fill(self, name: str, budget: int) -> None:
        """Let a document whose next step does not fit have the best that does, beside its hull."""
        member = self._members[name]
        if member.filler is not None:
            return
        at = member.climbed
        for point in member.fillers():
            needed = self.used + point.byte_count - at.byte_count - budget
            given = self._given_up(needed, member.weight * (point.value - at.value), name)
            if given is not None:
                self._give_up(given)
                member.filler = point
                self.used += point.byte_count - at.byte_count
                self._filled.append(name)
                self.moved.add(name)
                return

    def _clear_fillers(self) -> None:
        for name in self._filled:
            member = self._members.get(name)
            if member is not None and member.filler is not None:
                self.used += member.climbed.byte_count - member.filler.byte_count
                member.filler = None
                self.moved.add(name)
        self._filled.clear()

    def _climb(self, name: str, steps: int) -> None:
        member = self._members[name]
        before = member.climbed.byte_count
        member.level += steps
        self.used += member.climbed.byte_count - before
        self.moved.add(name)
        self._climbers.add(name)
        self._enter(name, member)

    def _enter(self, name: str, member: Member) -> None:
        self._versions += 1
        member.version = self._versions
        if member.level:
            heapq.heappush(self._down, (member.slope(member.level), name, member.version))
        if member.level < len(member.hull):
            slope = member.slope(member.level + 1)
            heapq.heappush(self._up, (-slope, name, member.version))
        self._tidy()

    def _top(self, heap: list[_Entry]) -> _Entry | None:
        """Return the first entry of a heap that is still true, and forget those before it."""
        while heap:
            self.looked_at += 1
            _, name, version = heap[0]
            member = self._members.get(name)
            if member is not None and member.version == version:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _tidy(self) -> None:
        """Forget entries that are no longer true where they are most of a heap."""
        for heap in (self._up, self._down):
            if len(heap) > 64 + 4 * len(self._members):
                heap[:] = [
                    entry
                    for entry in heap
                    if (member := self._members.get(entry[1])) and member.version == entry[2]
                ]
                heapq.heapify(heap)
