# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer generate` was asked for, validated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hillinfer.byte_size import ByteSize
from hillinfer.errors import SettingsError
from hillinfer.models.number_type import NumberType
from hillinfer.prompt import PromptStyle
from hillinfer.question_reading import QuestionReading
from hillinfer.sampling import Sampling
from hillinfer.settings import Settings
from hillinfer.special_tokens import SpecialTokens
from hillinfer.thread_count import check_threads

STOCK = "stock"


class Compare(StrEnum):
    """What a run is compared with."""

    FULL = "full"


class Asking(StrEnum):
    """Where questions come from."""

    OPTIONS = "options"
    INTERACTIVE = "interactive"


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
