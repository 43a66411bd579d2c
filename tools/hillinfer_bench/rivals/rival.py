# SPDX-License-Identifier: Apache-2.0
"""What every rival can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

import torch

from hillinfer.errors import CacheUseError
from hillinfer.storage.row_layout import RowLayout
from hillinfer_bench.rivals.meter import Meter
from hillinfer_bench.rivals.setup import RivalSetup
from hillinfer_bench.rivals.traffic import Traffic


class Rival(ABC):
    """The KV of several sequences, attended to in decode the way another system does.

    A step is `begin_step`, then for every layer in order `append` and `attend` of every sequence;
    appends of a layer may all come before its attends. A context manager that closes.

    Parameters
    ----------
    setup
        The same for all rivals of a comparison.

    Raises
    ------
    BudgetError
        Where the budget cannot hold what this rival must hold.
    ColdPoolError
        Where the drive or its directory cannot be used.
    """

    wants_prediction: ClassVar[bool] = False
    """Whether `predict` is worth calling."""
    bounded: ClassVar[bool] = True
    """Whether the rival keeps within the budget."""
    holds_prompt: ClassVar[bool] = False
    """Whether prompts are held in memory, beyond the budget and not on the drive, until they are
    cut."""
    direct: ClassVar[bool] = True
    """Whether its reads of the drive pass the page cache by, where that can be."""

    def __init__(self, setup: RivalSetup) -> None:
        self.setup = setup
        self.layout = RowLayout(setup.shape)
        self.meter = Meter(setup.budget_bytes if self.bounded else None)
        self.lengths = [[0] * setup.batch for _ in range(setup.shape.layers)]

    def scored_token_bytes(self) -> float:
        """Return the bytes per token of a sequence, all layers, that a step reads only to rank."""
        return 0.0

    def attended_token_bytes(self) -> float:
        """Return the least bytes per token of a sequence, all layers, that attention reads.

        From memory, over all tokens: where only some are attended to, their share of it. The rows
        of the importance rate's tokens, where not said otherwise.
        """
        return self.setup.alpha * self.setup.shape.token_bytes

    def describe(self) -> str:
        """Return in a few words what this rival chose for itself."""
        return ""

    @abstractmethod
    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take more of a sequence's prompt, without attention.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        keys, values
            Stored type, (kv_heads, tokens, head_dim), on the CPU.

        Raises
        ------
        CacheUseError
            Where the sequence gets longer than `setup.context`.
        """

    # Most rivals have no use for this one, nor for `predict`.
    def observe(  # noqa: B027
        self, layer: int, row: int, queries: torch.Tensor, scaling: float
    ) -> None:
        """Look at the last queries of the prompt, after `fill`.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        queries
            (query_heads, n, head_dim), those of the last n tokens.
        scaling
            Factor on inner products.
        """

    def begin_step(self) -> None:
        """Learn that the next decode step begins."""
        self.meter.count_step()

    def predict(  # noqa: B027
        self, layer: int, query: torch.Tensor, scaling: float
    ) -> None:
        """Learn a layer's approximate queries before the layer is reached.

        Only useful where `wants_prediction`; anything may be left out, and a layer without
        prediction is attended to with its true query alone.

        Parameters
        ----------
        layer
            The layer that comes next.
        query
            (batch, query_heads, 1, head_dim).
        scaling
            Factor on inner products.
        """

    @abstractmethod
    def append(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the KV of one new token; shapes and errors as in `fill`, with one token."""

    @abstractmethod
    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend with the newest token's query.

        Parameters
        ----------
        layer, row
            Where the token was just appended.
        query
            (query_heads, 1, head_dim).
        scaling
            Factor on inner products.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.
        """

    def traffic(self) -> Traffic:
        """Return what was read, written and held so far."""
        return self.meter.traffic()

    def settle(self) -> None:
        """Wait for what steps have left under way, such as reads for the next one."""
        # Totals have it all in them, so they wait for it.
        self.traffic()

    @abstractmethod
    def close(self) -> None:
        """Give memory, threads and the drive's space back; harmless when done twice."""

    def grow(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Check new keys and values, count their tokens and return the length before."""
        shape, start = self.setup.shape, self.lengths[layer][row]
        expected = (shape.kv_heads, keys.shape[1] if keys.ndim == 3 else 1, shape.head_dim)
        kind = self.layout.stored_type
        if not tuple(keys.shape) == tuple(values.shape) == expected or not (
            keys.dtype == values.dtype == kind
        ):
            raise CacheUseError(
                f"keys {tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} "
                f"{values.dtype} of layer {layer}: both must be {expected} {kind}"
            )
        if start + keys.shape[1] > self.setup.context:
            raise CacheUseError(
                f"{start + keys.shape[1]} tokens in sequence {row}, but context="
                f"{self.setup.context}: make the rival with a larger context"
            )
        self.lengths[layer][row] = start + keys.shape[1]
        return start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
