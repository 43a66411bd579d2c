# SPDX-License-Identifier: Apache-2.0
"""One request while it is worked on, and what it tells whoever waits for it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hillinfer.generate.answering import Generation
from hillinfer.serve.answers import AnswerText, GrammarState, Piece, WishedTokens
from hillinfer.serve.refusals import ApiError
from hillinfer.serve.requests import AnswerWishes

if TYPE_CHECKING:
    from hillinfer.serve.served_model import Begun

# --- What is told ---


@dataclass(frozen=True)
class ReadSoFar:
    """How much of a prompt is read; `cached` tokens of it came from a store."""

    done: int
    tokens: int
    cached: int


@dataclass(frozen=True)
class Usage:
    """What a request took.

    Parameters
    ----------
    prompt_tokens, cached_tokens, answer_tokens
        Tokens of the prompt, those of them that a store brought, and those of all answers.
    queue_seconds, first_token_seconds, seconds
        From its arrival to the first work, to the first token, and to the end; the second is None
        where none came.
    hot_hit_rate, drive_read_bytes, drive_wait_seconds
        Share of selected rows found in DRAM, what was read from the drive, and waited for.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    queue_seconds: float
    first_token_seconds: float | None
    seconds: float
    hot_hit_rate: float = 1.0
    drive_read_bytes: int = 0
    drive_wait_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers behind the first, by the time they took; 0 without any."""
        taken = self.seconds - (self.first_token_seconds or 0.0)
        return (self.answer_tokens - 1) / taken if self.answer_tokens > 1 and taken > 0 else 0.0


@dataclass(frozen=True)
class Done:
    """All answers are complete."""

    usage: Usage


@dataclass(frozen=True)
class Failed:
    """Nothing more comes."""

    error: ApiError


Event = ReadSoFar | Piece | Done | Failed

CANCELLED, FAILED = "cancelled", "error"

# --- The request ---

_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Given:
    """A token of a prompt whose log-probability is asked for.

    Parameters
    ----------
    token_id
        Which.
    begin
        Where its text begins, in characters from the answer's begin: below 0.
    """

    token_id: int
    begin: int


@dataclass(eq=False)
class Choice:
    """One answer that grows, and the token that its cache gets next.

    What `given` has left is the prompt's: these tokens come before those that are chosen.
    """

    job: Job
    number: int
    generation: Generation
    chooser: WishedTokens
    text: AnswerText
    given: deque[Given]
    token_id: int = -1
    answer_ids: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """A request of a client.

    The first fields are as whoever asks fills them in; the others are the scheduler's alone, but
    for `is_cancelled`, which anybody may set.

    Parameters
    ----------
    prompt_ids
        Tokens of the prompt that are read in chunks, one at least.
    wishes
        How answers are to be made.
    most_tokens
        Of each.
    tenant
        Keeps stored prompts apart.
    tell
        Called with each event, from the inference thread; must not wait.
    deadline
        By `time.monotonic`, when it is given up.
    is_background
        Whether it only reads a document ahead: it takes no sequence's place from anybody.
    grammar
        Of its answers, before their first token; None where they may be any text.
    endpoint
        Which route asked: `chat`, `completions` or `files`.
    trace_parent
        Of the trace that the client named (W3C's `traceparent`); None where it named none.
    given
        Tokens of the prompt behind `prompt_ids`: each is a step of its own, as in an answer, so
        that its log-probability is behind selected tokens.
    before
        Last tokens of the prompt where an answer's text goes on with theirs; none in a chat.
    """

    prompt_ids: list[int]
    wishes: AnswerWishes
    most_tokens: int
    tenant: bytes
    tell: Callable[[Event], None]
    deadline: float
    arrived: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    number: int = field(default_factory=lambda: next(_NUMBERS))
    is_background: bool = False
    grammar: GrammarState | None = None
    endpoint: str = "files"
    trace_parent: str | None = None
    given: tuple[Given, ...] = ()
    before: tuple[int, ...] = ()
    # --- the scheduler's ---
    generation: Generation | None = None
    steps: Iterator[int] | None = None
    last_turn: int = 0
    is_looked_up: bool = False
    cached_tokens: int = 0
    read_tokens: int = 0
    # Of its last turn, in tokens that are read.
    last_work: float = 0.0
    # What it began with: a document's form, where one was ready.
    origin: Begun | None = None
    started_choices: int = 0
    running: list[Choice] = field(default_factory=list)
    answer_tokens: int = 0
    begun: float | None = None
    first_token: float | None = None
    ended: float | None = None
    finish: str | None = None
    usage: Usage | None = None

    @property
    def tokens(self) -> int:
        """Most tokens that each of its sequences has."""
        return self.prompt_tokens + self.most_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.prompt_ids) + len(self.given)

    @property
    def form(self) -> str | None:
        """Name of the form that its document was opened from; None where none was ready."""
        return None if self.origin is None else self.origin.form

    @property
    def is_greedy(self) -> bool:
        """Whether each token of its answers is the most probable one, and nothing else counts."""
        wishes = self.wishes
        is_changed = wishes.bias or wishes.presence or wishes.frequency or self.grammar
        return not (self.is_background or wishes.sampling.temperature or is_changed)

    @property
    def has_choices(self) -> bool:
        """Whether answers are still to be begun."""
        return self.started_choices < self.wishes.choices

    def cancel(self) -> None:
        """Ask for its end, from any thread: it comes within one forward pass."""
        self.is_cancelled = True
