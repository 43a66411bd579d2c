# SPDX-License-Identifier: Apache-2.0
"""One document read once, and answers to questions about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hillinfer.counters import Counters
from hillinfer.errors import HillInferError
from hillinfer.generation import Generation
from hillinfer.prompt import QuestionPrompt
from hillinfer.question_reading import QuestionReading
from hillinfer.run_report import Answer, Finish
from hillinfer.sampling import Sampling
from hillinfer.statistics import CacheStatistics
from hillinfer.text_stream import TextStream

Progress = Callable[[int], None]


def _unseen(done: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made.

    Parameters
    ----------
    sampling, max_new_tokens, stop_ids
        As `Generation.decode` takes them.
    question_reading
        CHUNKS attends to everything; SINGLY reads token by token as in decode, each with a
        selected set of its own.
    """

    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int]
    question_reading: QuestionReading = QuestionReading.CHUNKS


class Answering:
    """Reads a document into a cache and answers each question on a fork of it.

    Parameters
    ----------
    generation
        With an empty cache.
    tokenizer
        The model's.
    prompt
        Makes ids of questions about the document.
    options
        See `AnswerOptions`.

    Attributes
    ----------
    document_tokens, document_seconds
        Tokens of the document read so far and the time that took; right even after reading failed.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Any,
        prompt: QuestionPrompt,
        options: AnswerOptions,
    ) -> None:
        self.generation = generation
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._options = options
        self.document_tokens = 0
        self.document_seconds = 0.0

    def read(self, token_ids: list[int], on_progress: Progress = _unseen) -> float:
        """Read the document's ids in chunks and return the seconds that took.

        Raises
        ------
        HillInferError
            Where it fails in the middle.
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

        An error in the middle ends the answer as `Finish.FAILED` and is told in it, so that what
        was generated until then is not lost.

        Parameters
        ----------
        question
            About the document.
        on_text
            Called with each piece of text as it comes.
        on_progress
            Called with the number of new tokens so far.
        """
        try:
            fork = self.generation.fork()
        except HillInferError as error:
            return _unread(question, 0, 0.0, error)
        try:
            return self._answer(fork, question, on_text, on_progress)
        finally:
            fork.close()

    def ask_last(
        self, question: str, on_text: Callable[[str], None], on_progress: Progress = _unseen
    ) -> Answer:
        """Answer the last question on the document's own cache; parameters as in `ask`."""
        return self._answer(self.generation, question, on_text, on_progress)

    def go_on(self, on_text: Callable[[str], None], on_progress: Progress = _unseen) -> Answer:
        """Go on from the document itself, which was the whole prompt; parameters as in `ask`."""
        return self._decode(self.generation, None, 0, 0.0, on_text, on_progress)

    def _answer(
        self,
        generation: Generation,
        question: str,
        on_text: Callable[[str], None],
        on_progress: Progress,
    ) -> Answer:
        ids = self._prompt.question_ids(question)
        started = time.perf_counter()
        read = 0

        def advance(done: int) -> None:
            nonlocal read
            read = done

        try:
            if self._options.question_reading is QuestionReading.SINGLY:
                generation.read_singly(ids, advance)
            else:
                generation.read(ids, advance)
        except HillInferError as error:
            return _unread(question, read, time.perf_counter() - started, error)
        seconds = time.perf_counter() - started
        return self._decode(generation, question, len(ids), seconds, on_text, on_progress)

    def _decode(
        self,
        generation: Generation,
        question: str | None,
        question_tokens: int,
        question_seconds: float,
        on_text: Callable[[str], None],
        on_progress: Progress,
    ) -> Answer:
        options, stream = self._options, TextStream(self._tokenizer)
        ids: list[int] = []
        pieces: list[str] = []
        finish = Finish.LENGTH
        error: str | None = None

        def show(piece: str) -> None:
            if piece:
                pieces.append(piece)
                on_text(piece)

        before = generation.statistics()
        started = time.perf_counter()
        try:
            for token_id in generation.decode(
                options.sampling, options.max_new_tokens, options.stop_ids
            ):
                ids.append(token_id)
                show(stream.push(token_id))
                on_progress(len(ids))
            if ids and ids[-1] in options.stop_ids:
                finish = Finish.STOP
        except KeyboardInterrupt:
            # What was generated stays: the caller shows it, reports it and then ends.
            finish = Finish.INTERRUPTED
        except HillInferError as caught:
            finish, error = Finish.FAILED, str(caught)
        seconds = time.perf_counter() - started
        show(stream.finish())
        after = generation.statistics()
        return Answer(
            question=question,
            text="".join(pieces),
            token_ids=tuple(ids),
            question_tokens=question_tokens,
            question_seconds=question_seconds,
            decode_seconds=seconds,
            finish=finish,
            decode_counts=_counts(before, after),
            error=error,
        )


def _unread(question: str, tokens: int, seconds: float, error: HillInferError) -> Answer:
    """Return the answer to a question that could not be read to its end."""
    return Answer(
        question=question,
        text="",
        token_ids=(),
        question_tokens=tokens,
        question_seconds=seconds,
        decode_seconds=0.0,
        finish=Finish.FAILED,
        decode_counts={},
        error=str(error),
    )


def _counts(before: CacheStatistics | None, after: CacheStatistics | None) -> dict[str, float]:
    if before is None or after is None:
        return {}
    difference = after.minus(before)
    return {field.name: getattr(difference, field.name) for field in fields(Counters)}
