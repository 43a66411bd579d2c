# SPDX-License-Identifier: Apache-2.0
"""Reads C++ expressions: what a value depends on, and behind how many additions."""

from __future__ import annotations

import re
from dataclasses import dataclass

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


def tokens_of(body: str) -> list[str]:
    """Return the tokens of C++ without comments and pragmas; a type's `<...>` belongs to it."""
    return _TOKEN.findall(re.sub(r"^ *#.*$", "", re.sub(r"//.*", "", body), flags=re.MULTILINE))


def is_name(token: str) -> bool:
    """Return whether a token is a name, of a type for example."""
    return token[0].isalpha() or token[0] == "_"


@dataclass
class Expressions:
    """Reads expressions one after another and keeps what every name depends on.

    Parameters
    ----------
    tokens
        What is read.
    depths
        Of every name known; calls change those of their arguments.
    place
        Index of the next token.
    """

    tokens: list[str]
    depths: dict[str, Depths]
    place: int = 0

    def next(self, expected: str = "") -> str:
        """Take the next token."""
        token = self.tokens[self.place]
        if expected and token != expected:
            around = " ".join(self.tokens[max(0, self.place - 8) : self.place + 4])
            raise ValueError(f"{expected} expected, not {token}, in: {around}")
        self.place += 1
        return token

    def peek(self, ahead: int = 0) -> str:
        """Return a token without taking it; empty behind the last one."""
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    def expression(self, level: int = -1) -> Depths:
        """Read one expression and return what its value depends on."""
        if level < 0:
            value = self.expression(0)
            if self.peek() == "?":
                self.next()
                value = merge(value, self.expression())
                self.next(":")
                value = merge(value, self.expression())
            return value
        if level == len(_PRECEDENCE):
            return self._unary()
        value = self.expression(level + 1)
        while self.peek() in _PRECEDENCE[level]:
            operator = self.next()
            value = merge(value, self.expression(level + 1))
            if operator in _ADDITIONS:
                value = added(value)
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
        return self._suffixes(self.depths.get(name, {}) if is_name(name) else {}, name)

    def _suffixes(self, value: Depths, name: str) -> Depths:
        while self.peek() in {"[", ".", "("}:
            if self.peek() == "[":
                value = merge(value, self._index())
            elif self.peek() == ".":
                self.next()
                name = "." + self.next()
            else:
                value = merge(value, self._arguments())
                is_method, is_cast = name.startswith("."), name.endswith(">") or name[:1].isupper()
                if not is_method and (not is_cast or name.endswith("::add")):
                    value = added(value)
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
            if brackets[0] == "(" and is_name(self.peek()) and self.peek(1) in {",", ")"}:
                names.append(self.peek())
            value = merge(value, self.expression())
            if self.peek() == ",":
                self.next()
        self.next(brackets[1])
        for name in names:
            self.depths[name] = merge(self.depths.get(name, {}), value)
        return value


def merge(one: Depths, other: Depths) -> Depths:
    """Return the larger depth of each value in both."""
    return {name: max(one.get(name, -1), other.get(name, -1)) for name in {*one, *other}}


def added(value: Depths) -> Depths:
    """Return the depths behind one more addition."""
    return {name: depth + 1 for name, depth in value.items()}
