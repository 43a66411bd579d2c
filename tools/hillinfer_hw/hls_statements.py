# SPDX-License-Identifier: Apache-2.0
"""Reads the plain C++ of a loop's body: what each value depends on, and behind how many additions.

Assignments, `if`, unrolled `for` loops and calls; it refuses what it does not know.
"""

from __future__ import annotations

from hillinfer_hw.hls_expressions import Depths, Expressions, added, is_name, merge

# Two passes show what a further copy of an unrolled body adds to a chain.
_UNROLLED_PASSES = 2


class Statements(Expressions):
    """Walks once through statements; `depths` are afterwards those behind them."""

    def statement(self, conditions: tuple[Depths, ...] = ()) -> None:
        """Read one statement under conditions of these depths.

        Raises
        ------
        ValueError
            Where it is none that this knows.
        """
        if self.peek() == "{":
            self.next()
            while self.peek() != "}":
                self.statement(conditions)
            self.next()
        elif self.peek() == "if":
            self.next()
            self._if(conditions)
        elif self.peek() == "for":
            self.next()
            self._unrolled(conditions)
        elif self.peek() == "typedef":
            while self.next() != ";":
                pass
        else:
            self._simple(conditions)

    def _if(self, conditions: tuple[Depths, ...]) -> None:
        self.next("(")
        inside = (*conditions, self.expression())
        self.next(")")
        before = _copy(self.depths)
        self.statement(inside)
        after, self.depths = self.depths, before
        if self.peek() == "else":
            self.next()
            self.statement(inside)
        for name, depths in after.items():
            self.depths[name] = merge(self.depths.get(name, {}), depths)

    def _unrolled(self, conditions: tuple[Depths, ...]) -> None:
        self.next("(")
        header = []
        while self.peek() != ")":
            header.append(self.next())
        self.next(")")
        counter = header[header.index("=") - 1]
        start, entry = self.place, _copy(self.depths)
        end = self._end_of_statement()
        derived = {counter}
        for place in range(start, end):
            if self.peek(place - self.place + 1) == "=" and is_name(self.tokens[place]):
                stop = self.tokens.index(";", place)
                if derived & {*self.tokens[place + 2 : stop]}:
                    derived.add(self.tokens[place])
        separate = self._arrays_by(derived, start, end)
        result = entry
        for _ in range(_UNROLLED_PASSES):
            self.place = start
            for name in separate:
                self.depths[name] = dict(entry.get(name, {}))
            self.statement(conditions)
            result = {
                name: merge(result.get(name, {}), self.depths.get(name, {}))
                for name in {*result, *self.depths}
            }
        self.depths = result

    def _end_of_statement(self) -> int:
        depth, place = 0, self.place
        while True:
            depth += (self.tokens[place] == "{") - (self.tokens[place] == "}")
            place += 1
            if depth == 0 and self.tokens[place - 1] in {"}", ";"}:
                return place

    def _arrays_by(self, derived: set[str], start: int, end: int) -> set[str]:
        """Return the arrays of which every copy of an unrolled body has elements of its own."""
        separate: dict[str, bool] = {}
        for place in range(start, end):
            if self.tokens[place + 1] != "[" or not is_name(self.tokens[place]):
                continue
            first = place
            while self.tokens[first - 1] == ".":
                first -= 2
            last = place + 1
            while self.tokens[last] == "[":
                last = self.tokens.index("]", last) + 1
            own = bool(derived & {*self.tokens[place:last]})
            name = self.tokens[first]
            separate[name] = separate.get(name, True) and own
        return {name for name, own in separate.items() if own}

    def _simple(self, conditions: tuple[Depths, ...]) -> None:
        while self.peek() in {"const", "constexpr"}:
            self.next()
        if self.peek() in {"++", "--"}:
            self.next()
            name, _ = self._target()
            self._set(name, added(self.depths.get(name, {})), conditions)
        elif is_name(self.peek()) and is_name(self.peek(1)):
            self.next()
            self._declaration(conditions)
            return
        else:
            start = self.place
            name, whole = self._target()
            kept = {} if whole else self.depths.get(name, {})
            operator = self.peek()
            if operator == "=":
                self.next()
                self._set(name, merge(kept, self.expression()), conditions)
            elif operator.endswith("=") and operator not in {"==", "!=", "<=", ">="}:
                self.next()
                value = merge(self.depths.get(name, {}), self.expression())
                value = added(value) if operator[0] in "+-*" else value
                self._set(name, value, conditions)
            else:
                self.place = start
                self.expression()
        self.next(";")

    def _declaration(self, conditions: tuple[Depths, ...]) -> None:
        name = self.next()
        while self.peek() == "[":
            self._index()
        value: Depths = {}
        if self.peek() == "=":
            self.next()
            value = self.expression()
        self.depths[name] = value
        self.next(";")

    def _target(self) -> tuple[str, bool]:
        """Read what is assigned to: its first name, and whether it is assigned whole."""
        name, whole = self.next(), True
        while self.peek() in {"[", ".", "("}:
            whole = False
            if self.peek() == ".":
                self.next()
                self.next()
            elif self.peek() == "[":
                self._index()
            else:
                self._arguments()
        return name, whole

    def _set(self, name: str, value: Depths, conditions: tuple[Depths, ...]) -> None:
        for condition in conditions:
            value = merge(value, condition)
        self.depths[name] = value


def _copy(depths: dict[str, Depths]) -> dict[str, Depths]:
    return {name: dict(value) for name, value in depths.items()}
