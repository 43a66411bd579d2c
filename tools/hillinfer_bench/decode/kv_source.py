# SPDX-License-Identifier: Apache-2.0
"""Keys and values that every system is filled with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hillinfer.model_shape import ModelShape
from hillinfer.storage.row_layout import RowLayout
from hillinfer_bench.quality.prefix import Prefix

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
