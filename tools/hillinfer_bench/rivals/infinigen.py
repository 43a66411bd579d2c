# SPDX-License-Identifier: Apache-2.0
"""InfiniGen: selection by partial keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_bench.rivals.block_attention import (
    Part,
    RowProducts,
    best_tokens,
    count,
    replayed,
    summed_weights,
    whole,
)
from hillinfer_bench.rivals.drive_rows import DriveRival, Landing
from hillinfer_bench.rivals.pooled_rows import Fetch, Fetched, FetchThread, PooledRows
from hillinfer_bench.rivals.rival import Meter, RivalSetup, Traffic
from hillinfer_model.kernel_spec import GROUP_TOKENS

# The share of channels that InfiniGen keeps.
RATIO = 0.3


class PartialKeys:
    """Every key's coordinates along the directions in which a head's keys differ most.

    The directions are found once for each layer, sequence and KV head, from the first keys that
    come: those with the largest singular values. What keys have in common shifts all inner products
    alike and changes no attention weight.

    Parameters
    ----------
    setup
        Says how many layers, sequences and tokens.
    dtype
        The stored type.
    meter
        Counts keys and directions.
    """

    def __init__(self, setup: RivalSetup, dtype: torch.dtype, meter: Meter) -> None:
        shape = setup.shape
        self.channels = max(1, round(RATIO * shape.head_dim))
        head = (shape.layers, setup.batch, shape.kv_heads)
        size = (shape.layers, setup.batch, setup.context, shape.kv_heads, self.channels)
        self._keys = meter.tensor(size, dtype)
        reduced = replace(shape, head_dim=self.channels)
        self._products = RowProducts(reduced, setup.block_rows)
        self._directions = meter.tensor((*head, shape.head_dim, self.channels), torch.float32)

    def add(self, layer: int, row: int, first: int, keys: torch.Tensor) -> None:
        """Take the keys (kv_heads, tokens, head_dim) of tokens from `first` on."""
        wide = keys.float()
        if first == 0:
            centred = wide - wide.mean(1, keepdim=True)
            # Ascending eigenvalues, the squares of the singular values.
            vectors = torch.linalg.eigh(centred.transpose(1, 2) @ centred).eigenvectors
            self._directions[layer, row] = vectors[:, :, -self.channels :]
        reduced = wide @ self._directions[layer, row]
        self._keys[layer, row, first : first + keys.shape[1]] = reduced.transpose(0, 1)

    def logits(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, out: torch.Tensor
    ) -> None:
        """Compute approximate inner products of the first tokens, float32 (query_heads, tokens)."""
        directions = self._directions[layer, row]
        grouped = query.float().reshape(len(directions), -1, query.shape[-1])
        reduced = (grouped @ directions).reshape(len(query), 1, -1)
        tokens = out.shape[1]
        rows = self._keys[layer, row, :tokens].view(torch.uint8).view(tokens, -1).numpy()
        self._products.logits(reduced, scaling, rows, np.arange(tokens), out)

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._keys = self._directions = torch.empty(0)


@dataclass(eq=False)
class Ahead:
    """A fetch under way, and what it is of; `positions` are known with the first piece."""

    spilled: int
    positions: NDArray[np.int64]
    fetch: Fetch | None = None


class InfiniGen(DriveRival):
    """Speculates which tokens matter from partial keys in DRAM, and prefetches their rows.

    Given a layer's approximate query while the layer before computes (`predict`), a thread scores,
    selects and reads during that time. A layer without prediction is selected for with its true
    query. What partial keys leave of M0 is a pool of the rows used last.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    wants_prediction: ClassVar[bool] = True

    def prepare(self) -> None:
        """Take partial keys and buffers, and a pool with what is left; see `DriveRival`."""
        setup, shape = self.setup, self.setup.shape
        self.rows = self.open_rows(self.row_bytes, "rows")
        self.partial = PartialKeys(setup, self.layout.stored_type, self.meter)
        self._logits = self.meter.tensor((shape.query_heads, setup.context), torch.float32)
        most = count(setup, setup.context)
        # One layer's rows are attended to while the next one's come.
        self._landing = Landing(
            self.meter,
            setup.ahead_rows,
            2 * setup.batch,
            most,
            1,
            self.row_bytes,
            setup.piece_bytes,
        )
        # A group that leaves the tail meanwhile.
        late = self.meter.buffer(GROUP_TOKENS * self.row_bytes)
        self._late = late.reshape(GROUP_TOKENS, self.row_bytes)
        self.pool = PooledRows(setup, self.rows, 1, self.meter)
        self.pool.take_pool(self.meter.free_bytes)
        self._thread = FetchThread(self._landing)
        self._ahead: dict[tuple[int, int], Ahead] = {}

    def scored_token_bytes(self) -> float:
        """Return those of the partial keys; see `Rival`."""
        shape = self.setup.shape
        return 2.0 * shape.layers * shape.kv_heads * self.partial.channels

    def describe(self) -> str:
        """Return what partial keys keep and what the pool holds."""
        return (
            f"{self.partial.channels} of {self.setup.shape.head_dim} channels, "
            f"{self.pool.slots} rows pooled"
        )

    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep a part of each key; see `Rival`."""
        first = self.lengths[layer][row]
        super().fill(layer, row, keys, values)
        self.partial.add(layer, row, first, keys)

    def spill(self, layer: int, row: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Write the group; see `DriveRival`."""
        self.rows.write(layer, row, first, rows)
        if (layer, row) not in self._ahead:
            self.pool.put(layer, row, first, rows)

    def predict(self, layer: int, query: torch.Tensor, scaling: float) -> None:
        """Begin to select and read for a layer; see `Rival`."""
        if (layer, 0) in self._ahead:
            return
        for row in range(self.setup.batch):
            # The step's own token is not there yet; it is selected whatever its score.
            length = self.lengths[layer][row] + 1
            self._ahead[layer, row] = self._start(layer, row, query[row], scaling, length)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what was selected; see `Rival`."""
        length = self.lengths[layer][row]
        ahead = self._ahead.pop((layer, row), None)
        if ahead is None:
            ahead = self._start(layer, row, query, scaling, length)
        return self.attention.attend(query, self.batches(layer, row, ahead), scaling)

    def begin_step(self) -> None:
        """Forget predictions of a step that broke off; see `Rival`."""
        super().begin_step()
        self._drop_ahead()

    def traffic(self) -> Traffic:
        """Return the totals, what is being read ahead included; see `Rival`."""
        self._thread.wait()
        return super().traffic()

    def close(self) -> None:
        """Wait for what is being read and give everything back; see `Rival`."""
        self._drop_ahead()
        self._thread.close()
        super().close()
        self.pool.close()
        self.partial.close()
        self._landing.close()
        self._late = np.empty((0, 0), np.uint8)

    def _drop_ahead(self) -> None:
        for ahead in self._ahead.values():
            assert ahead.fetch is not None
            self._thread.drop(ahead.fetch)
        self._ahead = {}

    def _start(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, length: int
    ) -> Ahead:
        known = min(length, self.lengths[layer][row])
        ahead = Ahead(self.spilled[layer][row], np.zeros(0, np.int64))

        def fetched(memory: Iterator[NDArray[np.uint8]]) -> Iterator[Fetched]:
            logits = self._logits[:, :known]
            self.partial.logits(layer, row, query, scaling, logits)
            scores = np.zeros(length, np.float32)
            scores[:known] = summed_weights(logits)
            positions = best_tokens(self.setup, scores)
            ahead.positions = positions = replayed(self.setup, layer, row, length, positions)
            cold = positions[positions < ahead.spilled]
            yield from self.pool.fetch(layer, row, cold, memory)

        ahead.fetch = self._thread.start(fetched)
        return ahead

    def batches(self, layer: int, row: int, ahead: Ahead) -> Iterator[list[Part]]:
        """Yield the rows that were selected, as they come."""
        assert ahead.fetch is not None
        for fetched in self._thread.pieces(ahead.fetch):
            if fetched.is_last:
                yield [*self._rest(layer, row, ahead, fetched.parts)]
            else:
                # More was to be read than a piece holds.
                yield fetched.parts

    def _rest(self, layer: int, row: int, ahead: Ahead, parts: list[Part]) -> Iterator[Part]:
        """Yield the last piece's rows, those that left the tail meanwhile, and the tail's."""
        spilled, positions = self.spilled[layer][row], ahead.positions
        there, cold = np.searchsorted(positions, [ahead.spilled, spilled])
        if cold > there:
            # A group left the tail after the prefetch had begun; it may take the pool's slots.
            yield from (whole(rows[chosen]) for rows, chosen in parts)
            memory = iter([self._late])
            late = self.pool.fetch(layer, row, positions[there:cold], memory)
            yield from self._thread.only(late).parts
        else:
            yield from parts
        yield whole(self.tail(layer, row)[positions[cold:] - spilled])
