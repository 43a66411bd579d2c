# SPDX-License-Identifier: Apache-2.0
"""The text of an answer as its tokens come, held back where a stop text may have begun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hillinfer.generate.tokens import TextStream
from hillinfer.serve.choosing import Chosen
from hillinfer.serve.requests import AnswerWishes

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True)
class Piece:
    """What comes next of an answer.

    Parameters
    ----------
    choice
        Which answer of the request.
    text
        The text, maybe none.
    tokens
        Those that end within it, and where in the whole answer's text each begins.
    finish
        Why the answer ended with it: `stop` or `length`; None where it goes on.
    """

    choice: int
    text: str
    tokens: tuple[tuple[Chosen, int], ...] = ()
    finish: str | None = None


class AnswerText:
    """Makes pieces of an answer's tokens.

    A stop text may be spread over tokens. What may be the beginning of one is held back until it is
    known; the stop text itself never comes.

    Parameters
    ----------
    choice
        Number of the answer.
    tokenizer
        One of transformers.
    wishes
        Of the request.
    stop_ids
        Tokens that end the model's answers.
    most_tokens
        After so many it ends.
    """

    def __init__(
        self,
        choice: int,
        tokenizer: Any,
        wishes: AnswerWishes,
        stop_ids: frozenset[int],
        most_tokens: int,
    ) -> None:
        self._choice = choice
        self._stream = TextStream(tokenizer)
        self._stops = wishes.stops
        self._stop_ids = stop_ids if wishes.ends else frozenset()
        self._most = most_tokens
        self._held = ""
        self._sent = 0
        # Tokens that were not told yet: where their text begins and ends.
        self._waiting: list[tuple[Chosen, int, int]] = []
        self.count = 0

    def push(self, chosen: Chosen) -> Piece:
        """Take a token and return what is certain now."""
        self.count += 1
        if chosen.token_id in self._stop_ids:
            return self._ended(self._stream.finish(), STOP)
        text = self._stream.push(chosen.token_id)
        is_last = chosen.ends or self.count == self._most
        if is_last:
            text += self._stream.finish()
        begin = self._sent + len(self._held)
        self._held += text
        self._waiting.append((chosen, begin, begin + len(text)))
        found = [place for one in self._stops if (place := self._held.find(one)) >= 0]
        if found:
            return self._cut(min(found), STOP)
        if is_last:
            return self._ended("", STOP if chosen.ends else LENGTH)
        return self._out(len(self._held) - self._may_begin(), None)

    # --- inside ----------------------------------------------------------------------------

    def _ended(self, rest: str, finish: str) -> Piece:
        self._held += rest
        found = [place for one in self._stops if (place := self._held.find(one)) >= 0]
        if found:
            return self._cut(min(found), STOP)
        return self._out(len(self._held), finish)

    def _cut(self, length: int, finish: str) -> Piece:
        """Let go of what is before a stop text, with the tokens that begin there."""
        end = self._sent + length
        tokens = tuple((chosen, begin) for chosen, begin, _ in self._waiting if begin < end)
        return Piece(self._choice, self._held[:length], tokens, finish)

    def _out(self, length: int, finish: str | None) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._sent += length
        out = [one for one in self._waiting if one[2] <= self._sent]
        self._waiting = self._waiting[len(out) :]
        tokens = tuple((chosen, begin) for chosen, begin, _ in out)
        return Piece(self._choice, text, tokens, finish)

    def _may_begin(self) -> int:
        """Return how many letters at the end of what is held may begin a stop text."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )
