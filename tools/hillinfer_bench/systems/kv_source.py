# SPDX-License-Identifier: Apache-2.0
"""Keys, values and last queries that every system is filled with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from hillinfer.errors import SettingsError
from hillinfer.hf.hooks import QueryPredictor, predictor_of
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.settings import QuerySource
from hillinfer_bench.quality.forced_reading import Prefix

CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class Chunk:
    """Some tokens of every sequence.

    Parameters
    ----------
    ids
        (batch, tokens).
    keys, values
        One tensor per layer, stored type, (batch, kv_heads, tokens, head_dim).
    """

    ids: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclass(frozen=True)
class LastQueries:
    """Queries of a context's last tokens, for systems that weigh the prompt's attention.

    Parameters
    ----------
    layers
        Of each layer, (batch, query_heads, tokens, head_dim).
    scalings
        Of each layer, the factor on inner products.
    """

    layers: list[torch.Tensor]
    scalings: list[float]


class KVSource(ABC):
    """The KV of a context, and the tokens that are decoded after it."""

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """Yield the context piece by piece, the same at each call."""

    @abstractmethod
    def step_ids(self, step: int) -> torch.Tensor:
        """Return the tokens of a decode step, (batch, 1)."""

    def last_queries(self) -> LastQueries | None:
        """Return the context's last queries; None where no model read it."""
        return None


class RandomKV(KVSource):
    """Random rows; sequences and layers have rows of their own.

    Parameters
    ----------
    shape
        The model's.
    context, batch
        Tokens of a sequence, and sequences.
    """

    def __init__(self, shape: ModelShape, context: int, batch: int) -> None:
        self._shape = shape
        self._context = context
        self._batch = batch
        generator = torch.Generator().manual_seed(0)
        # Every chunk draws from the same numbers, turned by its own amount, so that drawing them
        # is not what takes the time.
        pool = torch.randn(2, shape.kv_heads, 2 * CHUNK_TOKENS, shape.head_dim, generator=generator)
        self._pool = pool.to(RowLayout(shape).stored_type)

    def chunks(self) -> Iterator[Chunk]:
        """Yield random rows; see `KVSource`."""
        for start in range(0, self._context, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, self._context - start)
            keys: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            for layer in range(self._shape.layers):
                turns = [
                    (start // CHUNK_TOKENS * 37 + layer * 101 + row * 211) % CHUNK_TOKENS
                    for row in range(self._batch)
                ]
                for into, pool in ((keys, self._pool[0]), (values, self._pool[1])):
                    into.append(torch.stack([pool[:, turn : turn + count] for turn in turns]))
            yield Chunk(self.step_ids(0).expand(-1, count), keys, values)

    def step_ids(self, step: int) -> torch.Tensor:
        """Return a token of its own for each sequence; see `KVSource`."""
        return torch.arange(1, self._batch + 1)[:, None]


class PrefixKV(KVSource):
    """What a model made of a text, read once for all systems.

    Parameters
    ----------
    prefix
        Keys and values of the context.
    token_ids
        The whole text; what follows the prefix is decoded.
    queries
        Its last ones; None where they are not known.
    """

    def __init__(
        self, prefix: Prefix, token_ids: tuple[int, ...], queries: LastQueries | None = None
    ) -> None:
        self._prefix = prefix
        self._queries = queries
        self._ids = torch.tensor([token_ids])

    def chunks(self) -> Iterator[Chunk]:
        """Yield the prefix; see `KVSource`."""
        for start in range(0, self._prefix.tokens, CHUNK_TOKENS):
            own = slice(start, min(start + CHUNK_TOKENS, self._prefix.tokens))
            yield Chunk(
                self._ids[:, own],
                [keys[:, :, own] for keys in self._prefix.keys],
                [values[:, :, own] for values in self._prefix.values],
            )

    def step_ids(self, step: int) -> torch.Tensor:
        """Return the text's token; see `KVSource`."""
        at = self._prefix.tokens + step
        return self._ids[:, at : at + 1]

    def last_queries(self) -> LastQueries | None:
        """Return what was kept while the text was read; see `KVSource`."""
        return self._queries


class PromptQueries:
    """Every layer's queries of the last tokens that a model read; a context manager of hooks.

    A layer's query is made of the layer's own input, as its attention makes it.

    Parameters
    ----------
    model
        A decoder-only transformers model.
    most
        Tokens whose queries are kept.

    Attributes
    ----------
    layers
        Of each layer, (batch, query_heads, tokens, head_dim); empty where nothing is known of the
        model's family.
    """

    def __init__(self, model: PreTrainedModel, most: int) -> None:
        self._model = model
        self._most = most
        self._hooks: list[Any] = []
        self._predictor = _predictor(model)
        self.layers: list[torch.Tensor] = []

    def scaling(self, layer: int) -> float:
        """Return the factor on a layer's inner products."""
        assert self._predictor is not None
        return self._predictor.scaling(self._model.get_decoder().layers[layer])

    def __enter__(self) -> PromptQueries:
        if self._predictor is not None:
            layers = list(self._model.get_decoder().layers)
            self.layers = [torch.empty(0)] * len(layers)
            self._hooks = [
                layer.register_forward_pre_hook(self._hook(number), with_kwargs=True)
                for number, layer in enumerate(layers)
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int) -> Any:
        predictor = self._predictor
        assert predictor is not None

        @torch.no_grad()
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = (args[0] if args else kwargs["hidden_states"])[:, -self._most :]
            rotary = kwargs.get("position_embeddings")
            if rotary is not None:
                rotary = tuple(part[:, -self._most :] for part in rotary)
            query = predictor.predict(module, hidden, rotary)
            earlier = self.layers[number]
            if earlier.numel():
                query = torch.cat([earlier, query], 2)
            self.layers[number] = query[:, :, -self._most :].clone()

        return keep


def _predictor(model: PreTrainedModel) -> QueryPredictor | None:
    try:
        return predictor_of(model.config.model_type, QuerySource.PREDICTED)
    except SettingsError:
        return None
