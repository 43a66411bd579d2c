# SPDX-License-Identifier: Apache-2.0
"""Counts the additions in a loop's recurrence: from the value of one round to that of the next.

A pipelined loop with an II of 1 has one clock for every cycle of dependences from a round to the
next.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from hillinfer_hw.hls_expressions import is_name, tokens_of
from hillinfer_hw.hls_statements import Statements


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
    tokens = tokens_of(body)
    locals_ = set(_declared(tokens))
    carried = sorted({name for name in _assigned(tokens) if name not in locals_})
    reader = Statements(tokens, {name: {name: 0} for name in carried})
    reader.statement()
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


def _declared(tokens: list[str]) -> Iterator[str]:
    """Yield the names of declarations: a type and a name follow each other."""
    for before, name, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        keyword = before in {"return", "else", "const", "constexpr", "typedef"}
        if is_name(before) and is_name(name) and not keyword and after in {"=", "[", ";", ":"}:
            yield name


def _assigned(tokens: list[str]) -> Iterator[str]:
    """Yield the first name of everything that a statement changes."""
    statement: list[str] = []
    for token in tokens:
        if token in {";", "{", "}"}:
            changes = {"=", "+=", "-=", "|=", ">>=", "<<=", "++", "--", "read_nb"}
            if changes & {*statement}:
                for name in statement:
                    if is_name(name) and name not in {"if", "else", "for", "const"}:
                        yield name
            statement = []
        else:
            statement.append(token)
