# SPDX-License-Identifier: Apache-2.0
"""The accountant of the DRAM budget M0: who holds how many of its bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from hillinfer.errors import BudgetError
from hillinfer.values import format_apart, format_bytes

# Tables of rows grow by so many: by more, and a short context counts entries that it never has.
TABLE_GROWTH_ROWS = 1024


class Part(StrEnum):
    """The four parts a report shows M0 in."""

    HOT = "hot"
    SHADOW = "shadow"
    STAGING = "staging"
    OTHER = "other"


class Loan:
    """Bytes of a budget that somebody has for a while; nothing takes them from him.

    Parameters
    ----------
    give
        Gives bytes back.
    byte_count
        How many they are.
    """

    def __init__(self, give: Callable[[int], None], byte_count: int) -> None:
        self._give, self._byte_count = give, byte_count

    def give_back(self) -> None:
        """Count them no more; harmless when done twice."""
        byte_count, self._byte_count = self._byte_count, 0
        self._give(byte_count)


class Accountant:
    """Knows every byte of M0 and never lets their sum pass the budget (design, section 2).

    Parameters
    ----------
    budget_bytes
        M0.

    Attributes
    ----------
    budget_bytes
        As given, or what it was raised to.
    changes
        Grows with every change of what is held, and of the budget.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.changes = 0
        self._held = dict.fromkeys(Part, 0)
        self._peak = dict(self._held)
        # Of what is held: what is counted while room for it is looked for, and may yet be refused.
        self._sought = dict.fromkeys(Part, 0)
        self._lent = 0
        # What is collected as garbage in the middle of a change gives its bytes back.
        self._changing = threading.RLock()
        self._make_room: list[Callable[[], None]] = []
        self._least_hot: Callable[[], int] | None = None
        self._sequences: Callable[[], int] | None = None

    def shared_by(self, sequences: Callable[[], int]) -> None:
        """Learn what tells how many sequences share it, whom a refusal names."""
        self._sequences = sequences

    def on_shortage(self, make_room: Callable[[], None]) -> None:
        """Name who gives memory up when something else needs it, behind those named before.

        `make_room` reads `bytes_for_hot_rows` and shrinks to it, or gives up `short_bytes`.
        """
        self._make_room.append(make_room)

    def let_grow(self, least_hot: Callable[[], int]) -> None:
        """Let the budget rise to what must be held, of hot rows no more than `least_hot()` bytes.

        For a budget that is a share of a context nobody knows the length of.
        """
        self._least_hot = least_hot

    def raise_to(self, budget_bytes: int) -> None:
        """Raise the budget; it never falls."""
        with self._changing:
            self.budget_bytes = max(self.budget_bytes, budget_bytes)
            self.changes += 1

    @property
    def bytes_for_hot_rows(self) -> int:
        """What is left for hot rows, those already held included."""
        return self.budget_bytes - sum(self._held.values()) + self._held[Part.HOT]

    @property
    def short_bytes(self) -> int:
        """By how much what is held passes the budget, while room is made; else 0."""
        return max(0, self._total() - self.budget_bytes)

    @property
    def spare_bytes(self) -> int:
        """What nothing holds; nothing gives way for so much."""
        with self._changing:
            return max(0, self.budget_bytes - self._total())

    def take(self, part: Part, byte_count: int) -> None:
        """Count bytes that are about to be allocated.

        Raises BudgetError where they do not fit even after hot rows were given up; nothing is
        counted then.
        """
        # Opening a long prompt counts hundreds of pieces, and mostly there is room.
        if not self.take_spare(part, byte_count):
            self._find_room(part, byte_count)

    def _find_room(self, part: Part, byte_count: int) -> None:
        """Raise the budget or let hot rows go; count the bytes no more where neither helps.

        What others look for room for at the same moment is no reason to refuse: of two that do not
        fit together, the first that is decided gets its bytes.
        """
        self._seek(part, byte_count)
        is_kept = False
        try:
            if self._least_hot is not None:
                others = self._total() - self._held[Part.HOT]
                self.raise_to(others + self._least_hot())
            for make_room in self._make_room:
                if self._total() > self.budget_bytes:
                    make_room()
            with self._changing:
                needed_bytes = self._total() - sum(self._sought.values()) + byte_count
                if needed_bytes <= self.budget_bytes:
                    is_kept = True
                    self._sought[part] -= byte_count
                    self._note_peak()
        finally:
            if not is_kept:
                self._seek(part, -byte_count)
        if not is_kept:
            budget, needed = format_apart(self.budget_bytes, needed_bytes)
            raise BudgetError(
                f"the DRAM budget of {budget} is too small: "
                f"{needed} are needed now ({self._describe()}, and "
                f"{format_bytes(byte_count)} more for {part}); raise --dram-budget{self._sharers()}"
            )

    def take_spare(self, part: Part, byte_count: int) -> bool:
        """Count bytes if they fit as things are; nothing gives way for them."""
        with self._changing:
            if self._total() + byte_count > self.budget_bytes:
                return False
            self._held[part] += byte_count
            self.changes += 1
            self._note_peak()
        return True

    def lend(self, byte_count: int) -> Loan | None:
        """Count bytes as `take_spare` does, until they are given back; None where they do not fit.

        Who plans for what comes later leaves room for them; see `lent_bytes`.
        """
        if not self.take_spare(Part.OTHER, byte_count):
            return None
        with self._changing:
            self._lent += byte_count
        return Loan(self._take_back, byte_count)

    @property
    def lent_bytes(self) -> int:
        """How many of the other bytes are lent."""
        return self._lent

    def give(self, part: Part, byte_count: int) -> None:
        """Count bytes that were freed."""
        self._change(part, -byte_count)

    @contextmanager
    def taking(self, part: Part, byte_count: int, passing: int = 0) -> Iterator[None]:
        """Count bytes that are allocated meanwhile; where that fails they are counted no more.

        `passing` are held beside them, and only meanwhile.
        """
        self.take(part, byte_count + passing)
        try:
            yield
        except BaseException:
            self.give(part, byte_count + passing)
            raise
        self.give(part, passing)

    def peak(self) -> dict[Part, int]:
        """Return the parts at the moment their sum was largest."""
        return dict(self._peak)

    def held(self) -> dict[Part, int]:
        """Return the parts now."""
        return dict(self._held)

    def _take_back(self, byte_count: int) -> None:
        with self._changing:
            self._lent -= byte_count
            self._held[Part.OTHER] -= byte_count
            self.changes += 1

    def _change(self, part: Part, byte_count: int) -> None:
        # Any thread may; not held while room is made, which waits for others.
        with self._changing:
            self._held[part] += byte_count
            self.changes += 1

    def _seek(self, part: Part, byte_count: int) -> None:
        with self._changing:
            self._held[part] += byte_count
            self._sought[part] += byte_count
            self.changes += 1

    def _note_peak(self) -> None:
        if self._total() - sum(self._sought.values()) > sum(self._peak.values()):
            self._peak = {part: held - self._sought[part] for part, held in self._held.items()}

    def _total(self) -> int:
        return sum(self._held.values())

    def _sharers(self) -> str:
        count = 0 if self._sequences is None else self._sequences()
        if count < 2:
            return ""
        return f", or use fewer caches or rows at a time: {count} sequences share it"

    def _describe(self) -> str:
        return ", ".join(f"{part} {format_bytes(count)}" for part, count in self._held.items())
