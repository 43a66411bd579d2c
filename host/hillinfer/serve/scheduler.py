# SPDX-License-Identifier: Apache-2.0
"""The server's scheduler: which prompt is read on next, and which answers decode together."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from hillinfer.errors import BudgetError, ColdPoolError, HillInferError
from hillinfer.extents.shared_chunks import StoredRowsError
from hillinfer.generate.answering import Generation
from hillinfer.serve.answers import LENGTH, AnswerText, Piece, WishedTokens
from hillinfer.serve.jobs import (
    CANCELLED,
    FAILED,
    Choice,
    Done,
    Event,
    Failed,
    Job,
    ReadSoFar,
    Usage,
)
from hillinfer.serve.refusals import ApiError, api_error
from hillinfer.serve.served_model import ServedModel

# What a token that a store brings takes of the time of one that is read. An estimate from first
# tokens of SmolLM2's streams on two cores; where it is wrong, turns are longer or shorter.
_FOUND_WORK = 1 / 26

# --- Whose turn it is to read ---


class ReadingPolicy(Protocol):
    """Chooses which prompt is read on by one forward pass."""

    def next(self, reading: Sequence[Job]) -> Job:
        """Return one of these; `Job.last_turn` says when each had its last one."""


class InTurns:
    """Each prompt gets a pass in its turn, so that none waits longer than all others need for one.

    A short prompt behind a long one is so answered long before the long one is read.
    """

    def next(self, reading: Sequence[Job]) -> Job:
        """Return the one whose last turn is longest ago."""
        return min(reading, key=lambda job: job.last_turn)


# --- The scheduler ---


class Scheduler:
    """Reads prompts and decodes answers of many requests, a pass of each kind in turn.

    Every turn takes cancellations, lets in who waits, reads a chunk's work at most, and gives every
    answer under way one token in one forward pass. So a prompt of any length delays an answer's
    next token by one chunk, and an answer of any length delays a prompt by one step a chunk. A
    chunk's work is one of a long prompt, or what several have behind what a store brought: those
    that come at once have their first tokens without steps of the others between them.

    Parameters
    ----------
    model
        That everything runs on.
    waiting
        Requests in the order in which they came; others may append to it.
    documents
        Documents to be read ahead, one at a time, beside all others; likewise.
    parallel
        Sequences that are open at once, those that read included.
    policy
        Chooses whose prompt is read.
    on_end
        Called with each request that has ended, whatever ended it, and what failed or None.
    """

    def __init__(
        self,
        model: ServedModel,
        waiting: deque[Job],
        documents: deque[Job],
        parallel: int,
        policy: ReadingPolicy,
        on_end: Callable[[Job, BaseException | None], None],
    ) -> None:
        self._model, self._waiting, self._parallel = model, waiting, parallel
        self._policy, self._on_end = policy, on_end
        self._documents = documents
        self._reading: list[Job] = []
        self._answering: list[Job] = []
        self._turn = 0
        self._has_failed_drive = False

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._documents or self._reading or self._answering)

    @property
    def running(self) -> int:
        """Requests and documents that are worked on."""
        return len(self._reading) + len(self._answering)

    @property
    def requests(self) -> int:
        """Requests of clients that are worked on; any thread may ask."""
        return sum(not job.is_background for job in [*self._reading, *self._answering])

    def turn(self) -> None:
        """Make one turn."""
        self._turn += 1
        self._take_ends()
        self._let_in()
        self._read_on()
        self._decode()

    def end_all(self, error: BaseException) -> None:
        """End every request with an error."""
        for job in [*self._reading, *self._answering]:
            self._fail(job, error)
        for waiting in (self._waiting, self._documents):
            while waiting:
                self._fail(waiting.popleft(), error)

    # --- who comes and goes ----------------------------------------------------------------

    def _take_ends(self) -> None:
        """End requests that nobody waits for, and those that take too long."""
        now = time.monotonic()
        for job in [*self._waiting, *self._documents, *self._reading, *self._answering]:
            if job.is_cancelled:
                self._end(job, CANCELLED)
            elif now > job.deadline:
                self._fail(
                    job,
                    ApiError(
                        504,
                        "the request took longer than this server allows",
                        "time_limit",
                        "server_error",
                    ),
                )

    @property
    def _is_full(self) -> bool:
        reading = sum(not job.is_background for job in self._reading)
        running = sum(len(job.running) for job in self._answering if not job.is_background)
        return reading + running >= self._parallel

    def _let_in(self) -> None:
        """Begin answers of prompts that are read, then prompts of requests that wait."""
        for job in list(self._answering):
            while job.has_choices and job.finish is None and not self._is_full:
                self._guarded(job, partial(self._begin_choice, job))
        if self._has_failed_drive and not self._renew():
            return
        while self._waiting and not self._is_full:
            if any(job.has_choices for job in self._answering):
                break
            if not self._begin(self._waiting):
                break
        # It has one token to choose at its end, so that it steps with nobody.
        if self._documents and not any(job.is_background for job in self._reading):
            self._begin(self._documents)

    def _renew(self) -> bool:
        """Open the engine anew whose drive has failed; False while sequences are open in it.

        It keeps what failed, and the drive may have room again.
        """
        if self.running:
            return False
        try:
            self._model.renew()
        except Exception as error:
            for waiting in (self._waiting, self._documents):
                if waiting:
                    self._fail(waiting[0], error)
            return False
        self._has_failed_drive = False
        return True

    def _begin(self, waiting: deque[Job]) -> bool:
        """Begin to read the first request's prompt; False where it must wait for room."""
        job = waiting[0]
        try:
            together = min(job.wishes.choices, self._parallel)
            begun = self._model.begin(job.tenant, job.prompt_ids, job.tokens, together)
        except BudgetError as error:
            if self.running:
                # Once others have ended there is more.
                return False
            waiting.popleft()
            self._fail(job, _too_long(job, error))
            return True
        except Exception as error:
            waiting.popleft()
            self._fail(job, error)
            return True
        job.generation, job.begun = begun.generation, time.monotonic()
        job.steps, job.origin = begun.reading(job.prompt_ids), begun
        # Whoever is reading has had no turn since.
        job.last_turn = self._turn
        # In this order: who asks meanwhile whether all are answered sees it in both, not in none.
        self._reading.append(job)
        waiting.popleft()
        return True

    # --- reading ---------------------------------------------------------------------------

    def _read_on(self) -> None:
        """Read prompts, each at most one pass, until a chunk's work is done."""
        room, had = float(self._model.chunk_tokens), set[Job]()
        while left := [job for job in self._reading if job not in had]:
            job = self._policy.next(left)
            if had and job.is_looked_up and self._next_tokens(job) > room:
                return
            had.add(job)
            job.last_turn = self._turn
            # The turn's first prompt is read whatever it takes.
            self._guarded(job, partial(self._read_chunk, job, math.inf if len(had) == 1 else room))
            room -= job.last_work
            if room <= 0:
                return
            # Who left meanwhile gets no pass.
            self._take_ends()

    def _next_tokens(self, job: Job) -> int:
        return min(len(job.prompt_ids) - job.read_tokens, self._model.chunk_tokens)

    def _read_chunk(self, job: Job, room: float) -> None:
        """Read a chunk of a prompt, and begin to answer where it was the last.

        A prompt that is new is looked up before. Where the chunk behind what was found is more than
        there is room for, it waits for another turn.
        """
        assert job.steps is not None
        job.last_work = 0.0
        if not job.is_looked_up:
            job.is_looked_up, job.cached_tokens = True, next(job.steps)
            job.read_tokens = job.cached_tokens
            job.last_work = _FOUND_WORK * job.cached_tokens
            self._tell(job, ReadSoFar(job.read_tokens, len(job.prompt_ids), job.cached_tokens))
            if job.last_work + self._next_tokens(job) > room:
                return
        if job.read_tokens < len(job.prompt_ids):
            before, job.read_tokens = job.read_tokens, next(job.steps)
            job.last_work += job.read_tokens - before
            self._tell(job, ReadSoFar(job.read_tokens, len(job.prompt_ids), job.cached_tokens))
        if job.read_tokens == len(job.prompt_ids):
            # What it has for the end of a prompt, such as storing it, it does here.
            next(job.steps, None)
            self._answering.append(job)
            self._reading.remove(job)
            self._begin_choice(job)

    def _begin_choice(self, job: Job) -> None:
        """Choose the first token of one more answer."""
        assert job.generation is not None
        number = job.started_choices
        is_last = number + 1 == job.wishes.choices
        # The last answer grows where the prompt is.
        generation = job.generation if is_last else job.generation.fork()
        job.started_choices += 1
        choice = Choice(
            job,
            number,
            generation,
            WishedTokens(
                job.wishes,
                number,
                generation.logits.device,
                None if job.grammar is None else job.grammar.fork(),
            ),
            AnswerText(
                number,
                self._model.tokenizer,
                job.wishes,
                self._model.stop_ids,
                job.most_tokens,
                job.before,
            ),
            deque(job.given),
        )
        job.running.append(choice)
        self._choose(choice)

    # --- decoding --------------------------------------------------------------------------

    def _decode(self) -> None:
        """Give every answer under way its next token."""
        running = [choice for job in self._answering for choice in job.running]
        # Those that began in this turn have a token already, which goes in with the others.
        if not running:
            return
        joining = [choice for choice in running if self._model.joins(choice.generation)]
        alone = [choice for choice in running if choice not in joining]
        try:
            if joining:
                self._step(joining)
        except Exception as error:
            if len(joining) == 1:
                self._fail(joining[0].job, error)
            else:
                # Whose fault it is shows alone; the others go on.
                alone += joining
        for choice in alone:
            if choice.job.finish is None:
                self._guarded(choice.job, partial(self._step, [choice]))

    def _step(self, choices: list[Choice]) -> None:
        self._model.step([one.generation for one in choices], [one.token_id for one in choices])
        for choice in choices:
            # Another answer of its request may have failed.
            if choice.job.finish is None:
                self._guarded(choice.job, partial(self._choose, choice))

    def _choose(self, choice: Choice) -> None:
        """Choose an answer's next token, tell it, and end what is complete."""
        job = choice.job
        piece = self._next_piece(choice)
        if piece.text or piece.tokens or piece.finish:
            self._tell(job, piece)
        if piece.finish is None:
            return
        job.running.remove(choice)
        if job.origin is not None and job.is_greedy:
            self._model.note_answer(job.origin, job.prompt_ids, choice.answer_ids)
        if job.running or job.has_choices:
            if choice.generation is not job.generation:
                defect = _close(choice.generation)
                if defect is not None:
                    raise defect
            return
        self._end(job, piece.finish)

    def _next_piece(self, choice: Choice) -> Piece:
        """Return what comes next of an answer, whose token it has then: one of the prompt first."""
        job, logits = choice.job, choice.generation.logits
        if choice.given or not job.most_tokens:
            scored = []
            if choice.given:
                given = choice.given.popleft()
                choice.token_id = given.token_id
                scored = [(choice.chooser.score(given.token_id, logits), given.begin)]
            is_last = not (choice.given or job.most_tokens)
            return Piece(choice.number, "", tuple(scored), LENGTH if is_last else None)
        chosen = choice.chooser.choose(logits)
        piece = choice.text.push(chosen)
        choice.token_id = chosen.token_id
        choice.answer_ids.append(chosen.token_id)
        job.answer_tokens += 1
        if job.first_token is None:
            job.first_token = time.monotonic()
        return piece

    # --- ends ------------------------------------------------------------------------------

    def _guarded(self, job: Job, act: Callable[[], None]) -> None:
        """Do something for one request, whose failure is its own."""
        try:
            act()
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        self._end(job, FAILED, error)

    def _end(self, job: Job, finish: str, error: BaseException | None = None) -> None:
        """Let a request go: close what it has, and tell it."""
        if job.finish is not None:
            return
        job.finish, job.ended = finish, time.monotonic()
        # Rows of a store that were lost are one sequence's alone.
        if isinstance(error, ColdPoolError) and not isinstance(error, StoredRowsError):
            self._has_failed_drive = True
        job.usage = self._usage(job)
        own = [choice.generation for choice in job.running]
        if job.generation is not None:
            own.append(job.generation)
        unclosed = [defect for one in dict.fromkeys(own) if (defect := _close(one)) is not None]
        job.running, job.generation, job.steps = [], None, None
        for jobs in (self._waiting, self._documents, self._reading, self._answering):
            with suppress(ValueError):
                jobs.remove(job)
        with suppress(Exception):
            self._model.count()
        # Before whoever waits is told: what is counted then has this request. Neither its log line
        # nor a defect in closing costs others their answers.
        with suppress(Exception):
            self._on_end(job, error or next(iter(unclosed), None))
        if error is not None:
            self._tell(job, Failed(api_error(error)))
        elif finish != CANCELLED:
            self._tell(job, Done(job.usage))

    def _usage(self, job: Job) -> Usage:
        assert job.ended is not None
        counted = None
        if job.generation is not None:
            # A drive that failed may be asked nothing any more.
            with suppress(Exception):
                counted = job.generation.statistics()
        begun = job.ended if job.begun is None else job.begun
        first = None if job.first_token is None else job.first_token - job.arrived
        usage = Usage(
            prompt_tokens=job.prompt_tokens,
            cached_tokens=job.cached_tokens,
            answer_tokens=job.answer_tokens,
            queue_seconds=begun - job.arrived,
            first_token_seconds=first,
            seconds=job.ended - job.arrived,
        )
        if counted is None:
            return usage
        rows = counted.hot_rows_read + counted.cold_rows_read
        return replace(
            usage,
            hot_hit_rate=counted.hot_rows_read / rows if rows else 1.0,
            drive_read_bytes=counted.cold_read_bytes,
            drive_wait_seconds=counted.drive_wait_seconds,
        )

    def _tell(self, job: Job, event: Event) -> None:
        # Whoever waited may be gone, with all that it waited in.
        with suppress(Exception):
            job.tell(event)


def _close(generation: Generation) -> Exception | None:
    """Close a sequence, and return what was not foreseen in that."""
    try:
        generation.close()
    except (HillInferError, OSError):
        return None
    except Exception as error:
        return error
    return None


def _too_long(job: Job, error: BudgetError) -> ApiError:
    return ApiError(
        400,
        f"{job.tokens} tokens of prompt and answer are more than the memory that this server has "
        f"for its caches holds: {error}",
        "context_length_exceeded",
    )
