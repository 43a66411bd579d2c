# SPDX-License-Identifier: Apache-2.0
"""Questions typed one by one, a line each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import BinaryIO

from rich.console import Console

from hillinfer.prompt import PromptError

_END_WORDS = frozenset({"exit", "quit"})
# No model has room for a question as long; a line without an end must not fill memory.
_MOST_BYTES = 1 << 20


def typed_questions(console: Console) -> Iterator[str]:
    """Yield a line each from standard input, until its end, an empty line or a word for the end.

    A line that is no text, or too long for any model, is named and the next one is awaited.

    Raises
    ------
    PromptError
        Where standard input cannot be read.
    """
    lines = sys.stdin.buffer
    while True:
        if sys.stdin.isatty():
            console.print("question (empty line to end): ", end="")
        line = _line(lines)
        if line is None:
            console.print(
                f"hillinfer: this question is longer than {_MOST_BYTES} bytes: ask a shorter one"
            )
            continue
        try:
            question = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            console.print(
                f"hillinfer: this question is not UTF-8 text (byte {error.start}): ask it again"
            )
            continue
        if not question or question in _END_WORDS:
            return
        yield question


def _line(lines: BinaryIO) -> bytes | None:
    """Return the next line, empty at the end; None for one that is too long, which is passed."""
    try:
        line = lines.readline(_MOST_BYTES)
        if len(line) < _MOST_BYTES or line.endswith(b"\n"):
            return line
        while rest := lines.readline(_MOST_BYTES):
            if rest.endswith(b"\n"):
                break
        return None
    except OSError as error:
        raise PromptError(
            f"cannot read questions from standard input: {error.strerror}; give them with "
            "--question"
        ) from error
