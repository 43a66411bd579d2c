# SPDX-License-Identifier: Apache-2.0
"""The interface of pruned prefill for whoever answers: prompt lengths, losses and completion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Completed:
    """How far a prompt that was read in stages is read whole.

    `tokens` are of the prompt, and of answers behind it, `done` how many of them every layer has,
    and `seconds` what that took so far; 0 where nothing was left out.
    """

    tokens: int
    done: int
    seconds: float = field(default=0.0, compare=False)

    @property
    def is_whole(self) -> bool:
        """Whether every layer has every token."""
        return self.done == self.tokens


# Takes a band's layers, how many tokens went through them, and how many are to.
OnDeeper = Callable[[range, int, int], None]


class AnswerProgress:
    """Is told how far reading and answering have come; this one shows nothing."""

    def read(self, done: int) -> None:
        """Take how many tokens of the document are read."""

    def deeper(self, layers: range, done: int, tokens: int) -> None:
        """Take how many of the tokens that deeper layers are to see went through them, from 0 on.

        Tokens that wait for a question go there behind all others.
        """

    def decoded(self, done: int) -> None:
        """Take how many new tokens there are: 0 where reading is over."""


class Stages(Protocol):
    """What reads prompts in stages, where anything does: it must know how long they are."""

    def prompt(
        self, tokens: int, question_tokens: int | None = None, on_deeper: OnDeeper | None = None
    ) -> AbstractContextManager[None]:
        """Return what encloses reading, in any chunks, of a prompt that ends behind so many."""

    def waiting(self, cache: Any) -> range | None:
        """Return the layers for which a cache's prompt waits; None where it waits for none."""

    def told_of(self, cache: Any) -> dict[str, Any] | None:
        """Return what a cache's prompt lost, for a report; None where it lost nothing."""

    def complete(self, cache: Any, is_over: Callable[[], bool]) -> Completed:
        """Read whole what a cache's prompt lost, as far as it goes until `is_over()`."""


class NoStages:
    """Reads every token in every layer."""

    def prompt(
        self, tokens: int, question_tokens: int | None = None, on_deeper: OnDeeper | None = None
    ) -> AbstractContextManager[None]:
        """Return what encloses nothing."""
        return nullcontext()

    def waiting(self, cache: Any) -> range | None:
        """Return None."""
        return None

    def told_of(self, cache: Any) -> dict[str, Any] | None:
        """Return None."""
        return None

    def complete(self, cache: Any, is_over: Callable[[], bool]) -> Completed:
        """Return that nothing is missing."""
        tokens = int(cache.get_seq_length())
        return Completed(tokens, tokens)
