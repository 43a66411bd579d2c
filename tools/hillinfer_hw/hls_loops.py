# SPDX-License-Identifier: Apache-2.0
"""Reads the labelled loops of HLS C++: their declared recurrence, II and use of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^(?:inline|extern \"C\") void (\w+)\(", re.MULTILINE)
_LOOP = re.compile(r"^( *)(\w+):\n((?: *//.*\n)*) *(?:for|while|do)\b(.*)", re.MULTILINE)
_ANY_LOOP = re.compile(r"^ *(?:for|while|do)\b.*\{$", re.MULTILINE)
_RECURRENCE = re.compile(r"// recurrence: (none|.+; distance .+)$", re.MULTILINE)
_ACCESS = re.compile(r"// access: (.+)$", re.MULTILINE)
_INTERVAL = re.compile(r"#pragma HLS PIPELINE II=(\d+)")
_COUNTER = re.compile(r"^ \(\w+ (\w+) = 0; .*; \+\+\1\) \{$")


@dataclass(frozen=True)
class Loop:
    """One labelled loop.

    Parameters
    ----------
    label
        Its name.
    body
        Its text in braces.
    counter
        What a `for` loop counts from 0 in steps of one; empty otherwise.
    recurrence
        What a round takes over from an earlier one, and its distance in rounds; `none` where there
        is nothing, empty where the loop does not say.
    access
        How it says to use memory; empty where it says nothing.
    interval
        Intended initiation interval; None where it is not pipelined itself.
    holds_loops
        Whether labelled loops lie in it.
    """

    label: str
    body: str
    counter: str
    recurrence: str
    access: str
    interval: int | None
    holds_loops: bool

    @property
    def style(self) -> str:
        """What its pipeline does where an input is missing; empty where it does not say.

        `stp` stalls, `frp` runs freely and `flp` flushes.
        """
        found = re.search(r"#pragma HLS PIPELINE II=\d+ style=(\w+)\n", self.body)
        return found.group(1) if found else ""


def functions_of(source: str) -> dict[str, tuple[list[str], str]]:
    """Return the parameters (whole declarations) and the body of every function of a source."""
    found = {}
    for match in _FUNCTION.finditer(source):
        close = _closing(source, match.end() - 1, "()")
        start = source.index("{", close)
        end = _closing(source, start, "{}")
        parameters = [part.strip() for part in source[match.end() : close].split(",")]
        found[match.group(1)] = ([" ".join(part.split()) for part in parameters], source[start:end])
    return found


def loops_of(body: str) -> list[Loop]:
    """Return the labelled loops of a function's body, outer ones first."""
    return list(_loops(body))


def unlabelled_loops(body: str) -> int:
    """Return how many loops are neither labelled nor unrolled."""
    unrolled = body.count("#pragma HLS UNROLL")
    return len(_ANY_LOOP.findall(body)) - len(loops_of(body)) - unrolled


def accesses(memory: str, loop: Loop) -> set[str]:
    """Return `linear` or `scattered` for every use of a pointer in a pipelined loop.

    The synthesis tool infers a burst where every round uses the next place: an index that is the
    loop's counter plus what no round changes, and a use that no round leaves out. Everything else
    is a transaction per beat.
    """
    found = set()
    for match in re.finditer(rf"\b{memory}\[([^\]]*)\]", loop.body):
        terms = [term.strip() for term in match.group(1).split("+")]
        others = [term for term in terms if term != loop.counter]
        steps = len(terms) - len(others) == 1 and bool(loop.counter)
        fixed = all(re.fullmatch(r"[A-Za-z_][\w.]*|\d+", term) for term in others)
        fixed = fixed and not any(_changes(term, loop.body) for term in others)
        before = loop.body[: match.start()]
        always = before.count("{") - before.count("}") == 1
        statement = re.split(r"[;{}]", before)[-1] + loop.body[match.end() :].split(";")[0]
        always = always and not re.search(r"\bif\b|\?|&&|\|\|", statement)
        found.add("linear" if steps and fixed and always else "scattered")
    return found


def loop_table(headers: Mapping[str, str]) -> list[tuple[str, Loop]]:
    """Return every labelled loop with its function, in order of the headers."""
    return [
        (name, loop)
        for text in headers.values()
        for name, (_, body) in functions_of(text).items()
        for loop in loops_of(body)
    ]


def loop_markdown(headers: Mapping[str, str]) -> str:
    """Return the table of loops as Markdown."""
    lines = [
        "| process | loop | recurrence and its distance in rounds | memory | intended II |",
        "|---|---|---|---|---|",
    ]
    for name, loop in loop_table(headers):
        interval = "holds other loops" if loop.interval is None else str(loop.interval)
        row = (f"`{name}`", f"`{loop.label}`", loop.recurrence, loop.access or "-", interval)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def plain_headers(folder: Path) -> dict[str, str]:
    """Return the text of the kernels' plain headers by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.h"))}


def _loops(body: str) -> Iterator[Loop]:
    for match in _LOOP.finditer(body):
        start = body.index("{\n", match.start(4))
        inner = body[start : _closing(body, start, "{}") + 1]
        nested = _LOOP.search(inner)
        interval = _INTERVAL.search(inner[: nested.start()] if nested else inner)
        counter = _COUNTER.match(match.group(4))
        recurrence, access = (rule.search(match.group(3)) for rule in (_RECURRENCE, _ACCESS))
        yield Loop(
            match.group(2),
            inner,
            counter.group(1) if counter else "",
            recurrence.group(1) if recurrence else "",
            access.group(1) if access else "",
            int(interval.group(1)) if interval else None,
            nested is not None,
        )


def _changes(term: str, body: str) -> bool:
    name = term.split(".")[0]
    return re.search(rf"(?:\+\+|--){name}\b|\b{name}\b[\w.]* *[-+|]?=[^=]", body) is not None


def _closing(text: str, start: int, pair: str) -> int:
    """Return the index of the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(f"[{re.escape(pair)}]").finditer(text, start):
        depth += 1 if match.group() == pair[0] else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"a {pair[0]} is never closed")
