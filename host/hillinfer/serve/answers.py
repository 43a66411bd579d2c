# SPDX-License-Identifier: Apache-2.0
"""The tokens of an answer: which may come next, which is chosen, and the text that they become."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hillinfer.generate.tokens import TextStream, TokenChooser
from hillinfer.serve.formats import AskedFormat
from hillinfer.serve.refusals import ApiError, invalid
from hillinfer.serve.requests import AnswerWishes

# --- What a form that was asked for allows, by llguidance ---

_MOST_SHOWN = 200


class Grammars:
    """Makes grammars' states for one model; any thread may use it.

    Parameters
    ----------
    tokenizer
        One of transformers.
    words
        How many tokens the model has logits for.
    stop_ids
        Tokens that end an answer; maybe none.
    """

    def __init__(self, tokenizer: Any, words: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._words, self._stop_ids = tokenizer, words, stop_ids
        self._lock = threading.Lock()
        self._known: Any = None

    def begin(self, asked: AskedFormat) -> GrammarState:
        """Return the state before an answer's first token; takes up to a second.

        Raises
        ------
        ApiError
            Where the grammar is none, asks for what llguidance does not know, or is too large, or
            the tokenizer is of a kind that it cannot use.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ApiError(
                400,
                f"{asked.param} is not supported by this server: it lacks llguidance, of the extra "
                "serve",
                "unsupported_value",
                param=asked.param,
            ) from error
        matcher = LLMatcher(self._own_tokenizer(asked.param), asked.grammar, log_level=0)
        if matcher.is_error():
            # The first line alone: others repeat the schema.
            reason = matcher.get_error().splitlines()[0][:_MOST_SHOWN]
            raise invalid(f"{asked.param} cannot be used: {reason}", asked.param)
        return GrammarState(matcher, self._words, asked.param)

    def _own_tokenizer(self, param: str) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._known is None:
                # Of a model whose answers do not end by themselves one token more, which has no
                # logit, stands for the end.
                ends = sorted(self._stop_ids) or [self._words]
                try:
                    self._known = from_tokenizer(
                        self._tokenizer, max(self._words, *ends, 0) + 1, eos_token=ends
                    )
                except ValueError as error:
                    raise ApiError(
                        400,
                        f"{param} is not supported with this model: its tokenizer is of a kind "
                        "that grammars cannot use",
                        "unsupported_value",
                        param=param,
                    ) from error
            return self._known


class GrammarState:
    """How far an answer has come.

    Parameters
    ----------
    matcher
        One of llguidance.
    words
        How many tokens the model has logits for.
    param
        The field that asked for the form.
    """

    def __init__(self, matcher: Any, words: int, param: str) -> None:
        self._matcher, self._words, self._param = matcher, words, param
        self._bits = np.zeros((words + 1 + 31) // 32, np.int32)

    def fork(self) -> GrammarState:
        """Return a state that goes on from here by itself."""
        return GrammarState(self._matcher.deep_copy(), self._words, self._param)

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (vocabulary,), in float32; those of other tokens are -inf.

        Raises
        ------
        ApiError
            Where the grammar became too large, or no token goes on.
        """
        # A word of the mask for each 32 tokens, its last one with what the model has no logits for.
        size = self._bits.size * self._bits.itemsize
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, size)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._words]
        allowed = torch.from_numpy(bits.astype(bool)).to(logits.device)
        if not bits.any():
            raise invalid(f"{self._param}: no token of this model goes on with it", self._param)
        changed = logits.float().clone()
        changed[: self._words][~allowed] = float("-inf")
        return changed

    def take(self, token_id: int) -> None:
        """Go on by a token; ApiError as of `masked`."""
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_over(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0][:_MOST_SHOWN]
            raise invalid(f"{self._param} cannot be used: {reason}", self._param)


# --- What is chosen, by a request's options ---

_SEEDS = 1 << 63
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Likely:
    """A token and its log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class Chosen:
    """A token of an answer.

    Parameters
    ----------
    token_id
        Which.
    logprob
        Of the model's own distribution, before temperature, bias and penalties; 0 where nobody
        asked.
    top
        The likeliest tokens with theirs, likeliest first.
    ends
        Whether nothing can follow it in the form that was asked for.
    """

    token_id: int
    logprob: float = 0.0
    top: tuple[Likely, ...] = ()
    ends: bool = False


class WishedTokens:
    """Chooses the tokens of one answer, with random numbers of its own.

    Without penalties, bias and logprobs they are those of `TokenChooser` from the same logits.

    Parameters
    ----------
    wishes
        Of the request.
    number
        Which of its answers: each has a seed of its own.
    device
        Where logits lie.
    grammar
        Of the answer, which goes on with each token; None where it may be any text.
    """

    def __init__(
        self,
        wishes: AnswerWishes,
        number: int,
        device: torch.device,
        grammar: GrammarState | None = None,
    ) -> None:
        seed = (wishes.sampling.seed + number) % _SEEDS
        self._chooser = TokenChooser(replace(wishes.sampling, seed=seed), device)
        self._wishes, self._grammar = wishes, grammar
        self._given: Counter[int] = Counter()

    def choose(self, logits: torch.Tensor) -> Chosen:
        """Return the next token, given logits of shape (vocabulary,).

        Raises
        ------
        CacheUseError
            Where the greatest of them is no finite number.
        ApiError
            As `GrammarState` says.
        """
        token_id = self._chooser.choose(self._wished(logits))
        self._given[token_id] += 1
        ends = False
        if self._grammar is not None:
            self._grammar.take(token_id)
            ends = self._grammar.is_over
        return self._told(token_id, logits, ends=ends)

    def score(self, token_id: int, logits: torch.Tensor) -> Chosen:
        """Return a token of the prompt, given the logits before it; the answer has it not."""
        return self._told(token_id, logits, ends=False)

    def _told(self, token_id: int, logits: torch.Tensor, *, ends: bool) -> Chosen:
        """Return a token with the log-probabilities that were asked for."""
        if self._wishes.top is None:
            return Chosen(token_id, ends=ends)
        # JSON has no infinity: what cannot come at all is told as other servers tell it.
        logprobs = logits.float().log_softmax(-1).clamp(min=_LEAST_LOGPROB)
        values, ids = logprobs.topk(min(self._wishes.top, len(logprobs)))
        top = tuple(map(Likely, ids.tolist(), values.tolist()))
        return Chosen(token_id, float(logprobs[token_id]), top, ends)

    def _wished(self, logits: torch.Tensor) -> torch.Tensor:
        wished = self._biased(logits)
        return wished if self._grammar is None else self._grammar.masked(wished)

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        wishes = self._wishes
        if not (wishes.bias or wishes.presence or wishes.frequency):
            return logits
        changed = logits.float().clone()
        for token_id, amount in wishes.bias:
            changed[token_id] += amount
        for token_id, count in self._given.items():
            changed[token_id] -= wishes.presence + wishes.frequency * count
        return changed


# --- The text, held back where a stop text may have begun ---

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
    before
        Tokens of the text that it goes on with; none where it begins anew, as in a chat.
    """

    def __init__(
        self,
        choice: int,
        tokenizer: Any,
        wishes: AnswerWishes,
        stop_ids: frozenset[int],
        most_tokens: int,
        before: Sequence[int] = (),
    ) -> None:
        self._choice = choice
        self._stream = TextStream(tokenizer, before)
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
