# SPDX-License-Identifier: Apache-2.0
"""Verdicts on an input, and their form in the report."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MOST_MESSAGE = 1_500
_TOLD_MESSAGE = 300


class WrongAnswerError(Exception):
    """An input was taken, and what came of it is not what its files say."""


class Kind(StrEnum):
    """What can become of an input; all but the first two are findings."""

    WORKED = "worked"
    REFUSED = "refused"
    TRACEBACK = "traceback"
    MESSAGE = "message"
    WRONG = "wrong"
    HANG = "hang"
    MEMORY = "memory"
    LEAK = "leak"
    CRASH = "crash"


FINE = frozenset({Kind.WORKED, Kind.REFUSED})
FINDINGS = tuple(kind for kind in Kind if kind not in FINE)


@dataclass(frozen=True)
class Verdict:
    """What became of one input.

    Parameters
    ----------
    kind
        In a word.
    what
        In a line: the error, or what leaked.
    where
        File and line in the product that is nearest to it; empty where that means nothing.
    """

    kind: Kind
    what: str = ""
    where: str = ""

    @property
    def fine(self) -> bool:
        """Whether there is nothing to mend."""
        return self.kind in FINE

    @property
    def signature(self) -> str:
        """What findings with one cause have in common."""
        return f"{self.kind} {self.what.split(':')[0]} at {self.where}"


def of_error(error: BaseException) -> Verdict:
    """Return the verdict for what a target raised."""
    from hillinfer.errors import Failure, HillInferError

    if out_of_memory(error):
        return Verdict(Kind.MEMORY, _told(error), place_of(error))
    if isinstance(error, WrongAnswerError):
        return Verdict(Kind.WRONG, str(error)[:_TOLD_MESSAGE], "")
    if not isinstance(error, HillInferError):
        return Verdict(Kind.TRACEBACK, _told(error), place_of(error))
    return of_message(Failure.of(error).message, place_of(error))


def of_message(message: str, where: str = "") -> Verdict:
    """Return the verdict for a refusal: one printable line of a length that a user reads."""
    from hillinfer.cli.ending import one_line

    # The command leaves out the middle of a long one, which is no excuse for it.
    length, shown = len(" ".join(message.split())), one_line(message)
    if not shown or length > MOST_MESSAGE or not shown.isprintable():
        return Verdict(Kind.MESSAGE, f"of {length} characters: {shown[:100]!a}", where)
    return Verdict(Kind.REFUSED, shown, where)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one behind it, is about memory that was not given."""
    seen: BaseException | None = error
    for _ in range(20):
        if seen is None:
            return False
        if isinstance(seen, MemoryError) or "allocate memory" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def place_of(error: BaseException) -> str:
    """Return the innermost place in the product that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/hillinfer" in frame.filename]
    if not own:
        return ""
    file = Path(own[-1].filename)
    return f"{file.parent.name}/{file.name}:{own[-1].lineno}"


def _told(error: BaseException) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text[:_TOLD_MESSAGE].encode("ascii", "backslashreplace").decode()
