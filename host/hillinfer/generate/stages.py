# SPDX-License-Identifier: Apache-2.0
"""Reading a prompt in stages, as whoever answers sees it: what it lost, and reading it whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Completed:
    """How far a prompt that was read in stages is read whole.

    Parameters
    ----------
    tokens
        Of the prompt, and of answers behind it.
    done
        How many of them every layer has.
    seconds
        What that took so far; 0 where nothing was left out.
    """

    tokens: int
    done: int
    seconds: float = field(default=0.0, compare=False)

    @property
    def is_whole(self) -> bool:
        """Whether every layer has every token."""
        return self.done == self.tokens


class Stages(Protocol):
    """What reads prompts in stages, where anything does: it must know how long they are."""

    def prompt(
        self, tokens: int, question_tokens: int | None = None
    ) -> AbstractContextManager[None]:
        """Return what encloses reading, in any chunks, of a prompt that ends behind so many."""

    def told_of(self, cache: Any) -> dict[str, Any] | None:
        """Return what a cache's prompt lost, for a report; None where it lost nothing."""

    def complete(self, cache: Any, is_over: Callable[[], bool]) -> Completed:
        """Read whole what a cache's prompt lost, as far as it goes until `is_over()`."""


class NoStages:
    """Reads every token in every layer."""

    def prompt(
        self, tokens: int, question_tokens: int | None = None
    ) -> AbstractContextManager[None]:
        """Return what encloses nothing."""
        return nullcontext()

    def told_of(self, cache: Any) -> dict[str, Any] | None:
        """Return None."""
        return None

    def complete(self, cache: Any, is_over: Callable[[], bool]) -> Completed:
        """Return that nothing is missing."""
        tokens = int(cache.get_seq_length())
        return Completed(tokens, tokens)
