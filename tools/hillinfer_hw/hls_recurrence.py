# SPDX-License-Identifier: Apache-2.0
"""Counts the additions between what a loop's round takes over and what it hands on.

A pipelined loop with an II of 1 has one clock for every cycle of dependences from a round to the
next. This reads the plain C++ of a loop's body: assignments, `if`, unrolled `for` loops and calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

# Which carried values a value depends on, and behind how many additions at most.
Depths = dict[str, int]

_TOKEN = re.compile(
    r"[A-Za-z_][\w:]*<[\w:, *+]*>|[A-Za-z_]\w*(?:::\w+)*|0x[0-9a-fA-F]+\w*|\d+\w*|"
    r"<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%|&^]=|[-+*/%|&^!~<>=?:.,;()\[\]{}]"
)
_PRECEDENCE = (
    *({"||"}, {"&&"}, {"|"}, {"^"}, {"&"}, {"==", "!="}, {"<", ">", "<=", ">="}, {"<<", ">>"}),
    *({"+", "-"}, {"*", "/", "%"}),
)
_ADDITIONS = {"+", "-", "*"}
_UNARY = {"!", "~", "-", "+", "&"}
# Two passes show what a further copy of an unrolled body adds to a chain.
_UNROLLED_PASSES = 2


@cache
def too_long(body: str) -> tuple[str, ...]:
    """Return the carried values of a loop whose recurrence holds more than one addition a round.

    Parameters
    ----------
    body
        The loop's body in its braces; what is declared in it is no carried value.

    Raises
    ------
    ValueError
        Where the body holds what this reader does not know.
    """
    text = re.sub(r"^ *#.*$", "", re.sub(r"//.*", "", body), flags=re.MULTILINE)
    tokens = _TOKEN.findall(text)
    locals_ = set(_declared(tokens))
    carried = sorted({name for name in _assigned(tokens) if name not in locals_})
    reader = _Reader(tokens, {name: {name: 0} for name in carried})
    reader.statement(())
    # A path that gains on one addition per round, and comes back to where it started.
    gain = {
        one: {other: depth - 1 for other, depth in reader.depths[one].items() if other in carried}
        for one in carried
    }
    for middle in carried:
        for one in carried:
            for other, further in list(gain[middle].items()):
                if middle in gain[one]:
                    through = gain[one][middle] + further
                    gain[one][other] = max(gain[one].get(other, through), through)
    return tuple(name for name in carried if gain[name].get(name, 0) > 0)


def _is_name(token: str) -> bool:
    return token[0].isalpha() or token[0] == "_"


def _declared(tokens: list[str]) -> Iterator[str]:
    """Yield the names of declarations: a type and a name follow each other."""
    for before, name, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        keyword = before in {"return", "else", "const", "constexpr", "typedef"}
        if _is_name(before) and _is_name(name) and not keyword and after in {"=", "[", ";", ":"}:
            yield name


def _assigned(tokens: list[str]) -> Iterator[str]:
    """Yield the first name of everything that a statement changes."""
    statement: list[str] = []
    for token in tokens:
        if token in {";", "{", "}"}:
            changes = {"=", "+=", "-=", "|=", ">>=", "<<=", "++", "--", "read_nb"}
            if changes & {*statement}:
                for name in statement:
                    if _is_name(name) and name not in {"if", "else", "for", "const"}:
                        yield name
            statement = []
        else:
            statement.append(token)


@dataclass
class _Reader:
    """Walks once through statements and keeps the depths of every name."""

    tokens: list[str]
    depths: dict[str, Depths]
    place: int = 0
    derived: set[str] = field(default_factory=set)

    def next(self, expected: str = "") -> str:
        token = self.tokens[self.place]
        if expected and token != expected:
            around = " ".join(self.tokens[max(0, self.place - 8) : self.place + 4])
            raise ValueError(f"{expected} expected, not {token}, in: {around}")
        self.place += 1
        return token

    def peek(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    # Statements. `conditions` are the depths of all conditions around one.

    def statement(self, conditions: tuple[Depths, ...]) -> None:
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
            self.depths[name] = _merge(self.depths.get(name, {}), depths)

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
            if self.peek(place - self.place + 1) == "=" and _is_name(self.tokens[place]):
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
                name: _merge(result.get(name, {}), self.depths.get(name, {}))
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
            if self.tokens[place + 1] != "[" or not _is_name(self.tokens[place]):
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
            self._set(name, _added(self.depths.get(name, {})), conditions)
        elif _is_name(self.peek()) and _is_name(self.peek(1)):
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
                self._set(name, _merge(kept, self.expression()), conditions)
            elif operator.endswith("=") and operator not in {"==", "!=", "<=", ">="}:
                self.next()
                value = _merge(self.depths.get(name, {}), self.expression())
                value = _added(value) if operator[0] in "+-*" else value
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
            value = _merge(value, condition)
        self.depths[name] = value

    # Expressions.

    def expression(self, level: int = -1) -> Depths:
        if level < 0:
            value = self.expression(0)
            if self.peek() == "?":
                self.next()
                value = _merge(value, self.expression())
                self.next(":")
                value = _merge(value, self.expression())
            return value
        if level == len(_PRECEDENCE):
            return self._unary()
        value = self.expression(level + 1)
        while self.peek() in _PRECEDENCE[level]:
            operator = self.next()
            value = _merge(value, self.expression(level + 1))
            if operator in _ADDITIONS:
                value = _added(value)
        return value

    def _unary(self) -> Depths:
        if self.peek() in _UNARY:
            self.next()
            return self._unary()
        if self.peek() == "{":
            return self._arguments(("{", "}"))
        if self.peek() == "(":
            self.next()
            value = self.expression()
            self.next(")")
            return self._suffixes(value, "")
        name = self.next()
        return self._suffixes(self.depths.get(name, {}) if _is_name(name) else {}, name)

    def _suffixes(self, value: Depths, name: str) -> Depths:
        while self.peek() in {"[", ".", "("}:
            if self.peek() == "[":
                value = _merge(value, self._index())
            elif self.peek() == ".":
                self.next()
                name = "." + self.next()
            else:
                value = _merge(value, self._arguments())
                is_method, is_cast = name.startswith("."), name.endswith(">") or name[:1].isupper()
                if not is_method and (not is_cast or name.endswith("::add")):
                    value = _added(value)
        return value

    def _index(self) -> Depths:
        self.next("[")
        value = self.expression()
        self.next("]")
        return value

    def _arguments(self, brackets: tuple[str, str] = ("(", ")")) -> Depths:
        """Read arguments; a plain name among them can be changed by the call."""
        self.next(brackets[0])
        value: Depths = {}
        names = []
        while self.peek() != brackets[1]:
            if brackets[0] == "(" and _is_name(self.peek()) and self.peek(1) in {",", ")"}:
                names.append(self.peek())
            value = _merge(value, self.expression())
            if self.peek() == ",":
                self.next()
        self.next(brackets[1])
        for name in names:
            self.depths[name] = _merge(self.depths.get(name, {}), value)
        return value


def _merge(one: Depths, other: Depths) -> Depths:
    return {name: max(one.get(name, -1), other.get(name, -1)) for name in {*one, *other}}


def _added(value: Depths) -> Depths:
    return {name: depth + 1 for name, depth in value.items()}


def _copy(depths: dict[str, Depths]) -> dict[str, Depths]:
    return {name: dict(value) for name, value in depths.items()}
