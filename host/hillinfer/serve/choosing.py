# SPDX-License-Identifier: Apache-2.0
"""Samples the next token of an answer by a request's options, and gives log-probabilities."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from hillinfer.generate.tokens import TokenChooser
from hillinfer.serve.formats.grammars import GrammarState
from hillinfer.serve.requests import AnswerWishes

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
