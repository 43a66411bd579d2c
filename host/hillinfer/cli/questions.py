# SPDX-License-Identifier: Apache-2.0
"""The document and the questions of a run, as files, options and standard input bring them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from hillinfer.errors import PromptError
from hillinfer.generate.prompt import bounded, check_text, decoded, read_text

# --- The document ---

_STDIN = Path("-")


def read_document(file: Path | None, text: str | None, option: str = "--prompt-file") -> str:
    """Return the document.

    `file` holds UTF-8 text and is `-` for standard input; `text` is the document itself. Either may
    be None. `option` named the file, for errors. Raises PromptError where both or none are given,
    or what is given cannot be read or is empty.
    """
    if file is not None and text is not None:
        raise PromptError("give the prompt with --prompt or with --prompt-file, not both")
    if text is None and reads_stdin(file, text):
        document, place = _from_stdin(), "standard input"
    elif text is None:
        assert file is not None
        document, place = read_text(file, "the prompt file", option), str(file)
    else:
        check_text(text, "--prompt")
        document, place = text, "--prompt"
    if not document.strip():
        raise PromptError(f"the prompt from {place} is empty: give a text to read")
    return document


def reads_stdin(file: Path | None, text: str | None) -> bool:
    """Whether `read_document` would take standard input."""
    return text is None and (file is None or file == _STDIN)


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise PromptError(
            "no prompt: give a text with --prompt-file or --prompt, or pipe one into stdin"
        )
    try:
        return decoded(bounded(sys.stdin.buffer, "standard input"), "standard input")
    except OSError as error:
        raise PromptError(
            f"cannot read standard input: {error.strerror}; give the text with --prompt-file"
        ) from error


# --- Typed questions ---

_END_WORDS = frozenset({"exit", "quit"})
# No model has room for a question as long; a line without an end must not fill memory.
_MOST_BYTES = 1 << 20


def typed_questions(console: Console) -> Iterator[str]:
    """Yield a line each from standard input, until its end, an empty line or a word for the end.

    A line that is no text, or too long for any model, is named and the next one is awaited.

    Raises PromptError where standard input cannot be read.
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


def worked_between(
    questions: Iterator[str], work: Callable[[Callable[[], bool]], None]
) -> Iterator[str]:
    """Yield questions; while each is awaited, another thread works, which it ends.

    `work` gets what says whether the next question is there, and ends soon then. What it raises is
    raised here.
    """
    while True:
        came, broke = threading.Event(), list[BaseException]()

        def between(came: threading.Event = came, broke: list[BaseException] = broke) -> None:
            try:
                work(came.is_set)
            except BaseException as error:
                broke.append(error)

        thread = threading.Thread(target=between, name="hillinfer-between-questions")
        thread.start()
        try:
            question = next(questions, None)
        finally:
            came.set()
            thread.join()
        if broke:
            raise broke[0]
        if question is None:
            return
        yield question


def fitting(
    questions: Iterator[str], count: Callable[[str], int], most: int, console: Console
) -> Iterator[str]:
    """Pass on the questions there is room for, of at most so many tokens; say which there is not.

    `count` says how many tokens a question has.
    """
    for question in questions:
        tokens = count(question)
        if tokens <= most:
            yield question
        else:
            console.print(
                f"hillinfer: this question has {tokens} tokens and there is room for {most}: ask a "
                "shorter one"
            )


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
