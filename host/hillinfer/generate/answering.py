# SPDX-License-Identifier: Apache-2.0
"""One document read once, and answers to questions about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from hillinfer.errors import Failure, Finish
from hillinfer.generate.loop import Generation, Sampling, TextStream
from hillinfer.generate.prompt import QuestionPrompt
from hillinfer.generate.run_report import Answer
from hillinfer.settings import QuestionReading
from hillinfer.statistics import CacheStatistics, Counters

Progress = Callable[[int], None]


def _unseen(done: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made.

    CHUNKS of a question attend to everything; SINGLY it is read token by token as in decode, each
    with a selected set of its own. The others are as `Generation.decode` takes them.
    """

    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int]
    question_reading: QuestionReading = QuestionReading.CHUNKS


@dataclass
class _Draft:
    """An answer while it comes, so that whatever ends it finds all of it here."""

    question: str | None
    question_tokens: int = 0
    question_seconds: float = 0.0
    decode_seconds: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: Finish | None = None
    counts: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def ended(self, error: BaseException) -> None:
        """Note what ended it; what came first counts."""
        failure = Failure.of(error)
        if self.finish not in (Finish.FAILED, Finish.INTERRUPTED):
            self.finish = failure.finish
            self.error = failure.message if failure.finish is Finish.FAILED else None

    def answer(self) -> Answer:
        """Return it as it is now."""
        return Answer(
            question=self.question,
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            question_tokens=self.question_tokens,
            question_seconds=self.question_seconds,
            decode_seconds=self.decode_seconds,
            # Nothing is noted only where an interrupt came between two lines of ours.
            finish=self.finish or Finish.INTERRUPTED,
            decode_counts=self.counts,
            error=self.error,
        )


class Answering:
    """Reads a document into a cache and answers each question on a fork of it.

    Whatever ends an answer in its middle, an interrupt and a defect too, is told in it, so that
    what was generated until then is not lost. The exception itself is in `broke`. `generation` has
    an empty cache; `prompt` makes ids of questions about the document.

    Attributes
    ----------
    tokenizer
        The model's.
    document_tokens, document_seconds
        Tokens of the document read so far and the time that took; right even after reading failed.
    broke
        What ended the last answer in its middle; None where nothing did.
    """

    def __init__(
        self, generation: Generation, tokenizer: Any, prompt: QuestionPrompt, options: AnswerOptions
    ) -> None:
        self.generation = generation
        self.tokenizer = tokenizer
        self._prompt = prompt
        self._options = options
        self._drafts: list[_Draft] = []
        self.document_tokens = 0
        self.document_seconds = 0.0
        self.broke: BaseException | None = None

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers so far, one that is not finished too."""
        return tuple(draft.answer() for draft in self._drafts)

    def read(self, token_ids: list[int], on_progress: Progress = _unseen) -> float:
        """Read the document's ids in chunks and return the seconds that took.

        Raises HillInferError where it fails in the middle.
        """
        started = time.perf_counter()

        def advance(done: int) -> None:
            self.document_tokens = done
            self.document_seconds = time.perf_counter() - started
            on_progress(done)

        self.generation.read(token_ids, advance)
        self.document_seconds = time.perf_counter() - started
        return self.document_seconds

    def ask(
        self, question: str, on_text: Callable[[str], None], on_progress: Progress = _unseen
    ) -> Answer:
        """Answer one question on a fork that is closed afterwards; others may follow.

        `on_text` is called with each piece of text as it comes, `on_progress` with the number of
        new tokens so far.
        """
        draft = self._begin(question)
        with self._told_in(draft):
            fork = self.generation.fork()
            try:
                self._read_question(fork, draft, question)
                self._decode(fork, draft, on_text, on_progress)
            finally:
                fork.close()
        return draft.answer()

    def ask_last(
        self, question: str, on_text: Callable[[str], None], on_progress: Progress = _unseen
    ) -> Answer:
        """Answer the last question on the document's own cache; parameters as in `ask`."""
        draft = self._begin(question)
        with self._told_in(draft):
            self._read_question(self.generation, draft, question)
            self._decode(self.generation, draft, on_text, on_progress)
        return draft.answer()

    def go_on(self, on_text: Callable[[str], None], on_progress: Progress = _unseen) -> Answer:
        """Go on from the document itself, which was the whole prompt; parameters as in `ask`."""
        draft = self._begin(None)
        with self._told_in(draft):
            self._decode(self.generation, draft, on_text, on_progress)
        return draft.answer()

    def _begin(self, question: str | None) -> _Draft:
        draft = _Draft(question)
        self.broke = None
        self._drafts.append(draft)
        return draft

    @contextmanager
    def _told_in(self, draft: _Draft) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.broke = self.broke or error
            draft.ended(error)

    def _read_question(self, generation: Generation, draft: _Draft, question: str) -> None:
        ids = self._prompt.question_ids(question)
        started = time.perf_counter()

        def advance(done: int) -> None:
            draft.question_tokens = done
            draft.question_seconds = time.perf_counter() - started

        singly = self._options.question_reading is QuestionReading.SINGLY
        try:
            (generation.read_singly if singly else generation.read)(ids, advance)
        finally:
            draft.question_seconds = time.perf_counter() - started

    def _decode(
        self,
        generation: Generation,
        draft: _Draft,
        on_text: Callable[[str], None],
        on_progress: Progress,
    ) -> None:
        options, stream = self._options, TextStream(self.tokenizer)

        def show(piece: str) -> None:
            if piece:
                draft.pieces.append(piece)
                on_text(piece)

        before = generation.statistics()
        started = time.perf_counter()
        with self._told_in(draft):
            for token_id in generation.decode(
                options.sampling, options.max_new_tokens, options.stop_ids
            ):
                draft.token_ids.append(token_id)
                show(stream.push(token_id))
                on_progress(len(draft.token_ids))
            stopped = bool(draft.token_ids) and draft.token_ids[-1] in options.stop_ids
            draft.finish = Finish.STOP if stopped else Finish.LENGTH
        draft.decode_seconds = time.perf_counter() - started
        show(stream.finish())
        draft.counts = _counts(before, generation.statistics())


def _counts(before: CacheStatistics | None, after: CacheStatistics | None) -> dict[str, float]:
    if before is None or after is None:
        return {}
    difference = after.minus(before)
    return {one.name: getattr(difference, one.name) for one in fields(Counters)}
