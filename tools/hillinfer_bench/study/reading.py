# SPDX-License-Identifier: Apache-2.0
"""Prompts that are read densely, and answers behind them that are read as decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from hillinfer_bench.quality.forced_reading import (
    ContinuationLayer,
    Prefix,
    forced_logits,
    selecting,
)
from hillinfer_bench.quality.policies import Attending, SelectionPolicy
from hillinfer_bench.study.ways import StudyWay

Policy = SelectionPolicy | Attending | None


class _GrownLayer(ContinuationLayer):
    """A layer of a continuation that keeps what it returned."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return prefix and new tokens, and keep them; see `ContinuationLayer`."""
        self.grown = super().update(key_states, value_states, *args, **kwargs)
        return self.grown


@torch.no_grad()
def grown(
    model: Any, prefix: Prefix, ids: Sequence[int], policies: Sequence[Policy]
) -> tuple[torch.Tensor, Prefix]:
    """Read tokens behind a prefix; return the logits after each of them, and the longer prefix.

    Parameters
    ----------
    model
        Of transformers, inside `selecting`.
    prefix
        What comes before; it stays as it is.
    ids
        What is read.
    policies
        Of each layer.

    Returns
    -------
    float32 of shape (tokens, vocabulary), and the prefix with the tokens' keys and values.
    """
    layers = [_GrownLayer(prefix, layer, policy) for layer, policy in enumerate(policies)]
    out = model(
        input_ids=torch.tensor([list(ids)]), past_key_values=Cache(layers=layers), use_cache=True
    )
    keys, values = zip(*(layer.grown for layer in layers), strict=True)
    return out.logits[0].float(), Prefix(prefix.shape, keys, values)


class ReadPrompt:
    """A prompt that was read densely, as a prefill is.

    Parameters
    ----------
    model
        Of transformers, with its own attention.
    ids
        Of the prompt.
    chunk_tokens
        Tokens of one forward call.
    """

    def __init__(self, model: Any, ids: Sequence[int], chunk_tokens: int = 1024) -> None:
        self._model = model
        self._ids = list(ids)
        before = Prefix.read(model, self._ids[:-1], chunk_tokens)
        with selecting(model):
            logits, self.prefix = grown(model, before, self._ids[-1:], [None] * before.shape.layers)
        self.last = logits[-1]
        """Logits behind the prompt, float32 (vocabulary,)."""

    def with_more(self, ids: Sequence[int]) -> ReadPrompt:
        """Return this prompt with more of it read densely."""
        longer = ReadPrompt.__new__(ReadPrompt)
        longer._model, longer._ids = self._model, [*self._ids, *ids]
        with selecting(self._model):
            logits, longer.prefix = grown(
                self._model, self.prefix, ids, [None] * self.prefix.shape.layers
            )
        longer.last = logits[-1]
        return longer

    def forced(self, way: StudyWay, ids: Sequence[int]) -> torch.Tensor:
        """Return what is expected before each of some tokens that are forced behind the prompt.

        The first comes from the prompt, whatever the way.

        Parameters
        ----------
        way
            How the tokens attend to what is before them.
        ids
            The tokens.

        Returns
        -------
        float32 of shape (tokens, vocabulary).
        """
        if len(ids) == 1:
            return self.last[None]
        prefix, observed = self._before(way)
        with selecting(self._model):
            policy = way.policy(prefix.shape)
            logits = forced_logits(self._model, prefix, [*observed, *ids[:-1]], policy)
        return torch.cat([self.last[None], logits[len(observed) :]])

    def generated(self, way: StudyWay, most: int, end: int | None) -> list[int]:
        """Return the most probable tokens behind the prompt, each read as a decode step.

        Parameters
        ----------
        way
            How they attend to what is before them.
        most
            At most so many, at least 1.
        end
            The token that ends an answer, which is not returned.
        """
        prefix, observed = self._before(way)
        policies = way.policies(prefix.shape)
        ids: list[int] = []
        last = self.last
        with selecting(self._model):
            if observed:
                _, prefix = grown(self._model, prefix, observed, policies)
            while len(ids) < most and (token := int(last.argmax())) != end:
                ids.append(token)
                if len(ids) < most:
                    logits, prefix = grown(self._model, prefix, [token], policies)
                    last = logits[-1]
        return ids

    def _before(self, way: StudyWay) -> tuple[Prefix, list[int]]:
        """Return what a way does not see queries of, and the tokens of which it does."""
        count = min(way.observed, len(self._ids) - 1)
        if not count:
            return self.prefix, []
        cut = self.prefix.tokens - count
        keys, values = (
            tuple(one[:, :, :cut] for one in part)
            for part in (self.prefix.keys, self.prefix.values)
        )
        return Prefix(self.prefix.shape, keys, values), self._ids[-count:]
