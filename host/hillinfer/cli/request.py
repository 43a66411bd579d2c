# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer generate` was asked for, validated: options, document, questions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from hillinfer.errors import SettingsError
from hillinfer.generate.prompt import (
    PromptError,
    PromptStyle,
    bounded,
    check_text,
    decoded,
    read_text,
)
from hillinfer.generate.sampling import Sampling
from hillinfer.generate.special_tokens import SpecialTokens
from hillinfer.settings import QuestionReading, Settings
from hillinfer.store.keys import Reuse
from hillinfer.store.store import Store
from hillinfer.system.machine import NumberType
from hillinfer.values import ByteSize, check_threads, choice

# --- The document ---

_STDIN = Path("-")


def read_document(file: Path | None, text: str | None) -> str:
    """Return the document.

    Parameters
    ----------
    file
        A file of UTF-8 text, `-` for standard input; None where there is none.
    text
        The document itself; None where there is none.

    Raises
    ------
    PromptError
        Where both or none are given, or what is given cannot be read or is empty.
    """
    if file is not None and text is not None:
        raise PromptError("give the prompt with --prompt or with --prompt-file, not both")
    if text is None and reads_stdin(file, text):
        document, place = _from_stdin(), "standard input"
    elif text is None:
        assert file is not None
        document, place = read_text(file, "the prompt file", "--prompt-file"), str(file)
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


# --- The request ---

STOCK = "stock"


class Compare(StrEnum):
    """What a run is compared with."""

    FULL = "full"


class Asking(StrEnum):
    """Where questions come from."""

    OPTIONS = "options"
    INTERACTIVE = "interactive"


@dataclass(frozen=True)
class StoreUse:
    """The store of a run.

    Parameters
    ----------
    directory
        Where it is.
    size
        Bytes to make it with where there is none; None: there must be one.
    reuse
        Where a stored prefix may end.
    salt
        Of a tenant.
    """

    directory: Path
    size: int | None
    reuse: Reuse
    salt: bytes

    @classmethod
    def of(cls, directory: Path | None, size: str | None, reuse: str, salt: str) -> StoreUse | None:
        """Return what options mean, None where they name no store.

        Raises
        ------
        SettingsError
            Where one of them means nothing.
        """
        way = choice("reuse", Reuse, reuse)
        if directory is None:
            return None
        amount = None if size is None else ByteSize.parse(size)
        if amount is not None and amount.byte_count is None:
            raise SettingsError(f"'{size}' is a share of nothing: give --store-size like 200GB")
        return cls(directory, None if amount is None else amount.byte_count, way, salt.encode())

    def opened(self) -> Store:
        """Return the store, made where there is none and a size was given.

        Raises
        ------
        StoreError
            Where there is none, or it cannot be used.
        """
        if self.size is not None and not Store.exists(self.directory):
            Store.create(self.directory, self.size)
        return Store(self.directory)


@dataclass(frozen=True)
class GenerateRequest:
    """One run of `hillinfer generate`.

    Parameters
    ----------
    model, number_type
        What to load, and in which type.
    document, prompt_style
        What to read, None where a session holds it, and whether it goes through the chat template.
    special_tokens
        How those in the document and in questions are read.
    questions
        About the document; empty where it is the whole prompt.
    asking, question_reading
        See the enumerations.
    max_new_tokens, sampling
        Of every answer.
    settings
        Of the cache, without the budget.
    budget
        DRAM budget; None for the default.
    chunk_tokens
        Tokens of one forward pass of prefill.
    threads
        Compute threads; None for torch's own choice.
    report
        Where `run.json` goes; None for nowhere.
    compare
        None for no comparison.
    session, save_session
        Directories of the session to use and of the one to save; None for none.
    projections
        Name in the table of projections: how linear layers are computed.
    store
        The store to look the document up in; None for none.
    prompt_file
        Where the document was read from; None where it was no file.

    Raises
    ------
    SettingsError
        Where a number is out of range.
    """

    model: str
    number_type: NumberType
    document: str | None
    prompt_style: PromptStyle
    questions: tuple[str, ...]
    asking: Asking
    question_reading: QuestionReading
    max_new_tokens: int
    sampling: Sampling
    settings: Settings
    budget: ByteSize | None
    chunk_tokens: int
    threads: int | None
    report: Path | None
    compare: Compare | None
    session: Path | None = None
    save_session: Path | None = None
    projections: str = STOCK
    store: StoreUse | None = None
    prompt_file: Path | None = None
    special_tokens: SpecialTokens = SpecialTokens.TEXT

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for name, value in (
            ("max_new_tokens", self.max_new_tokens),
            ("prefill_chunk", self.chunk_tokens),
        ):
            if value < 1:
                raise SettingsError(f"{name}={value} must be at least 1")
        check_threads(self.threads)
        if self.questions and self.asking is Asking.INTERACTIVE:
            raise SettingsError("--question and --interactive exclude each other: give one")
        if self.compare and self.asking is Asking.INTERACTIVE:
            raise SettingsError("--compare full needs its questions beforehand: use --question")

        if self.document is None and not self.asks:
            raise SettingsError("--session needs something to answer: add --question")
        if self.document is None and self.save_session is not None:
            raise SettingsError(
                "--save-session needs a document to read: give it with --prompt-file"
            )
        if self.projections != STOCK and (self.session or self.save_session):
            raise SettingsError(
                f"--projections {self.projections} computes keys and values a little differently "
                f"than the model a session belongs to: use --projections {STOCK} with sessions"
            )
        if self.compare and self.only_saves:
            raise SettingsError("--compare full needs something to answer: add --question")

    @property
    def asks(self) -> bool:
        """Whether questions follow the document."""
        return bool(self.questions) or self.asking is Asking.INTERACTIVE

    @property
    def only_saves(self) -> bool:
        """Whether the document is read and saved and nothing is generated."""
        return self.save_session is not None and not self.asks

    @property
    def forks(self) -> int:
        """Forks of the document's cache alive at a time: the last question needs none."""
        return int(self.asking is Asking.INTERACTIVE or len(self.questions) > 1)
