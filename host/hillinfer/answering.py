# SPDX-License-Identifier: Apache-2.0
"""One document read once, and answers to questions about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hillinfer.counters import Counters
from hillinfer.generation import Generation
from hillinfer.prompt import DocumentPrompt
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
        The document; its questions follow.
    options
        See `AnswerOptions`.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Any,
        prompt: DocumentPrompt,
        options: AnswerOptions,
    ) -> None:
        self.generation = generation
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._options = options

    def read(self, token_ids: list[int], on_progress: Progress = _unseen) -> float:
        """Read the document's ids in chunks and return the seconds that took."""
        started = time.perf_counter()
        self.generation.read(token_ids, on_progress)
        return time.perf_counter() - started

    def ask(
        self, question: str, on_text: Callable[[str], None], on_progress: Progress = _unseen
    ) -> Answer:
        """Answer one question on a fork that is closed afterwards; others may follow.

        Parameters
        ----------
        question
            About the document.
        on_text
            Called with each piece of text as it comes.
        on_progress
            Called with the number of new tokens so far.
        """
        fork = self.generation.fork()
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
        if self._options.question_reading is QuestionReading.SINGLY:
            generation.read_singly(ids)
        else:
            generation.read(ids)
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
        )


def _counts(before: CacheStatistics | None, after: CacheStatistics | None) -> dict[str, float]:
    if before is None or after is None:
        return {}
    difference = after.minus(before)
    return {field.name: getattr(difference, field.name) for field in fields(Counters)}
