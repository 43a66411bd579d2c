# SPDX-License-Identifier: Apache-2.0
"""Reads a document into a cache, chooses token by token, and answers questions about it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hillinfer.errors import CacheUseError, Failure, Finish, SettingsError
from hillinfer.generate.prompt import QuestionPrompt
from hillinfer.generate.run_report import Answer
from hillinfer.generate.stages import AnswerProgress, Completed, NoStages, Stages
from hillinfer.generate.tokens import Sampling, TextStream, TokenChooser
from hillinfer.settings import QuestionReading
from hillinfer.statistics import CacheStatistics, Counters

if TYPE_CHECKING:
    import torch

# --- The loop ---


class Generation:
    """One sequence that grows in a cache, HillInfer's or transformers' own.

    The same tokens as `model.generate` with `prefill_chunk_size`, but every step is the caller's,
    for progress, text as it comes, stopping anywhere, and several questions about a document. The
    model is one of transformers, attached where the cache is HillInfer's; `cache` is what to pass
    as `past_key_values`, and `chunk_tokens` the tokens of one forward call while a prompt is read.
    `steps` is entered for each pass of one token: the model's products are others in it.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        chunk_tokens: int = 1024,
        steps: AbstractContextManager[object] | None = None,
    ) -> None:
        if chunk_tokens < 1:
            raise SettingsError(f"prefill_chunk={chunk_tokens} must be at least 1")
        self.cache = cache
        self._steps = steps or nullcontext()
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._logits: torch.Tensor | None = None

    def read(
        self, token_ids: Sequence[int], on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read tokens in chunks; every token of a chunk attends to everything before it.

        The first ones come from a store where the cache has one that holds them. `on_progress` is
        called after each chunk with the number of tokens read so far.
        """
        for done in self.reading(token_ids):
            if done:
                on_progress(done)

    def reading(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Read as `read` does, one forward pass each time that the next number is asked for.

        Yields how many tokens the cache has of them: first those that a store brought, maybe none,
        then those after each pass.
        """
        found = self._look_up(token_ids)
        yield found
        # Behind a stored prefix whatever is sooner.
        singly = getattr(self.cache, "reads_singly", lambda tokens: False)
        is_single = singly(len(token_ids) - found)
        size = 1 if is_single else self._chunk_tokens
        for start in range(found, len(token_ids), size):
            chunk = token_ids[start : start + size]
            with self._steps if is_single else nullcontext():
                self._forward(chunk)
            yield start + len(chunk)

    def read_singly(
        self, token_ids: Sequence[int], on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read tokens as `read` does, but one by one as in decode, each with a set of its own."""
        for done, token_id in enumerate(token_ids, start=1):
            self.step(token_id)
            on_progress(done)

    def read_by_one_set(
        self, token_ids: Sequence[int], on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read tokens in chunks, each attending to one selected set per layer and to itself.

        Parameters as in `read`. An ordinary cache has no sets: there every token attends to all.
        """
        with getattr(self.cache, "one_set", nullcontext)():
            self._read_chunks(token_ids, on_progress)

    def read_soonest(
        self, token_ids: Sequence[int], on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read a question densely, token by token or by one set, whichever rates say is soonest.

        Only behind what a store brought; else as `read`. What was chosen, and why, the cache's
        `read_from_store` tells. Parameters as in `read`.
        """
        chosen = getattr(self.cache, "question_way", lambda tokens: None)(len(token_ids))
        if chosen is None:
            self.read(token_ids, on_progress)
        elif chosen.is_read_singly:
            self.read_singly(token_ids, on_progress)
        elif chosen.is_read_by_one_set:
            self.read_by_one_set(token_ids, on_progress)
        else:
            self._read_chunks(token_ids, on_progress)

    def _read_chunks(self, token_ids: Sequence[int], on_progress: Callable[[int], None]) -> None:
        for start in range(0, len(token_ids), self._chunk_tokens):
            chunk = token_ids[start : start + self._chunk_tokens]
            self._forward(chunk)
            on_progress(start + len(chunk))

    def decode(
        self, sampling: Sampling, max_new_tokens: int, stop_ids: frozenset[int]
    ) -> Iterator[int]:
        """Yield new tokens until one of `stop_ids` (yielded too) or `max_new_tokens`.

        A token enters the cache when the next one is asked for, so afterwards the cache holds
        everything but the last, as after `model.generate`.

        Raises CacheUseError where nothing was read before.
        """
        chooser = TokenChooser(sampling, self.logits.device)
        for count in range(1, max_new_tokens + 1):
            token_id = chooser.choose(self.logits)
            yield token_id
            if token_id in stop_ids or count == max_new_tokens:
                return
            self.step(token_id)

    @property
    def logits(self) -> torch.Tensor:
        """Logits behind the last token, (vocabulary,); CacheUseError where nothing was read."""
        if self._logits is None:
            raise CacheUseError("nothing was read yet: call read() with the prompt first")
        return self._logits

    def step(self, token_id: int) -> None:
        """Give the cache one token, which `logits` are behind then."""
        with self._steps:
            self._forward([token_id])

    @staticmethod
    def step_together(
        model: Any, joined: Any, generations: Sequence[Generation], token_ids: Sequence[int]
    ) -> None:
        """Give each of several generations one token, in one forward pass of the model.

        `joined` is `Attachment.join` of their caches, in their order.
        """
        import torch

        ids = torch.tensor([[one] for one in token_ids], device=model.device)
        with torch.no_grad():
            output = model(**joined.inputs(ids), use_cache=True, logits_to_keep=1)
        for row, generation in enumerate(generations):
            generation._logits = output.logits[row, -1]

    def fork(self) -> Generation:
        """Return a generation that goes on from here by itself.

        A HillInfer cache shares its rows with the fork; an ordinary one is copied.
        """
        own = getattr(self.cache, "fork", None)
        cache = own() if own else copy.deepcopy(self.cache)
        twin = Generation(self._model, cache, self._chunk_tokens, self._steps)
        twin._logits = self._logits
        return twin

    def statistics(self) -> CacheStatistics | None:
        """Return what the cache counted so far; None for a cache that does not count."""
        count: Callable[[], CacheStatistics] | None = getattr(self.cache, "statistics", None)
        return count() if count else None

    def close(self) -> None:
        """Close the cache where it can be closed."""
        getattr(self.cache, "close", lambda: None)()

    def _look_up(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens the cache took from a store."""
        if not token_ids or not hasattr(self.cache, "look_up"):
            return 0
        found: int = self.cache.look_up(self._ids(token_ids), chunk_tokens=self._chunk_tokens)
        return found

    def _ids(self, token_ids: Sequence[int]) -> torch.Tensor:
        # Not above: the command reads its options without torch.
        import torch

        return torch.tensor([list(token_ids)], device=self._model.device)

    def _forward(self, token_ids: Sequence[int]) -> None:
        import torch

        ids = self._ids(token_ids)
        with torch.no_grad():
            output = self._model(
                input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            )
        self._logits = output.logits[0, -1]


# --- Answers ---


_UNSEEN = AnswerProgress()


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made.

    CHUNKS of a question attend to everything; SINGLY it is read token by token as in decode, each
    with a selected set of its own; with ONE_SET a chunk shares one set per layer. The others are as
    `Generation.decode` takes them.
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
    pruned: dict[str, Any] | None = None

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
            pruned=self.pruned,
        )


class Answering:
    """Reads a document into a cache and answers each question on a fork of it.

    Whatever ends an answer in its middle, an interrupt and a defect too, is told in it, so that
    what was generated until then is not lost; the exception itself is in `broke`, None where
    nothing ended the last one. `generation` has an empty cache; `prompt` makes ids of questions
    about the document; `stages` are told of each prompt before it is read.

    `document_tokens` and `document_seconds` are tokens of the document read so far and the time
    that took, right even after reading failed. `completed` says how far a document that was read in
    stages is read whole; None where nobody began.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Any,
        prompt: QuestionPrompt,
        options: AnswerOptions,
        stages: Stages | None = None,
    ) -> None:
        self._stages = stages or NoStages()
        self.generation = generation
        self.tokenizer = tokenizer
        self._prompt = prompt
        self._options = options
        self._drafts: list[_Draft] = []
        self.document_tokens = 0
        self.document_seconds = 0.0
        self.completed: Completed | None = None
        self.broke: BaseException | None = None

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers so far, one that is not finished too."""
        return tuple(draft.answer() for draft in self._drafts)

    def read(
        self, token_ids: list[int], progress: AnswerProgress = _UNSEEN, follows: int = 0
    ) -> float:
        """Read the document's ids in chunks and return the seconds that took.

        `follows` is how many tokens will follow at least before anything is answered. Raises
        HillInferError where it fails in the middle.
        """
        started = time.perf_counter()

        def advance(done: int) -> None:
            self.document_tokens = done
            self.document_seconds = time.perf_counter() - started
            progress.read(done)

        whole = self._held(self.generation) + len(token_ids) + follows
        with self._stages.prompt(whole, on_deeper=progress.deeper):
            self.generation.read(token_ids, advance)
        self.document_seconds = time.perf_counter() - started
        return self.document_seconds

    @property
    def waiting(self) -> range | None:
        """The layers that read the document with a question; None where all have read it."""
        return self._stages.waiting(self.generation.cache)

    def complete(self, is_over: Callable[[], bool] = lambda: False) -> Completed:
        """Read whole what reading in stages left out of the document, as far as it goes.

        `is_over` is asked now and then whether to stop. Raises HillInferError where it fails; the
        document then waits as before.
        """
        if self.completed is None or not self.completed.is_whole:
            self.completed = self._stages.complete(self.generation.cache, is_over)
        return self.completed

    def ask(
        self,
        question: str | None,
        on_text: Callable[[str], None],
        progress: AnswerProgress = _UNSEEN,
    ) -> Answer:
        """Answer one question on a fork that is closed afterwards; others may follow.

        Without a question the fork goes on from the document itself. `on_text` is called with each
        piece of text as it comes.
        """
        draft = self._begin(question)
        with self._told_in(draft):
            fork = self.generation.fork()
            try:
                self._answer(fork, draft, on_text, progress)
            finally:
                fork.close()
        return draft.answer()

    def ask_last(
        self,
        question: str | None,
        on_text: Callable[[str], None],
        progress: AnswerProgress = _UNSEEN,
    ) -> Answer:
        """Answer the last question on the document's own cache; parameters as in `ask`."""
        draft = self._begin(question)
        with self._told_in(draft):
            self._answer(self.generation, draft, on_text, progress)
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

    def _answer(
        self,
        generation: Generation,
        draft: _Draft,
        on_text: Callable[[str], None],
        progress: AnswerProgress,
    ) -> None:
        if draft.question is None:
            draft.pruned = self._stages.told_of(generation.cache)
        else:
            self._read_question(generation, draft, draft.question, progress)
        self._decode(generation, draft, on_text, progress)

    def _read_question(
        self, generation: Generation, draft: _Draft, question: str, progress: AnswerProgress
    ) -> None:
        ids = self._prompt.question_ids(question)
        started = time.perf_counter()

        def advance(done: int) -> None:
            draft.question_tokens = done
            draft.question_seconds = time.perf_counter() - started

        read = {
            QuestionReading.CHUNKS: generation.read,
            QuestionReading.SINGLY: generation.read_singly,
            QuestionReading.ONE_SET: generation.read_by_one_set,
            QuestionReading.AUTO: generation.read_soonest,
        }[self._options.question_reading]
        try:
            whole = self._held(generation) + len(ids)
            with self._stages.prompt(whole, len(ids), progress.deeper):
                read(ids, advance)
        finally:
            draft.question_seconds = time.perf_counter() - started
        draft.pruned = self._stages.told_of(generation.cache)

    @staticmethod
    def _held(generation: Generation) -> int:
        return int(generation.cache.get_seq_length())

    def _decode(
        self,
        generation: Generation,
        draft: _Draft,
        on_text: Callable[[str], None],
        progress: AnswerProgress,
    ) -> None:
        options, stream = self._options, TextStream(self.tokenizer)

        def show(piece: str) -> None:
            if piece:
                draft.pieces.append(piece)
                on_text(piece)

        before = generation.statistics()
        progress.decoded(0)
        started = time.perf_counter()
        with self._told_in(draft):
            for token_id in generation.decode(
                options.sampling, options.max_new_tokens, options.stop_ids
            ):
                draft.token_ids.append(token_id)
                show(stream.push(token_id))
                progress.decoded(len(draft.token_ids))
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
