# SPDX-License-Identifier: Apache-2.0
"""Heavy hitters found anew at every step, from all keys (H2O on a drive, as HillInfer reads it)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import PAGE_BYTES, round_up
from hillinfer_bench.rivals.block_stream import BlockStream
from hillinfer_bench.rivals.drive_rival import DriveRival
from hillinfer_bench.rivals.fetch_thread import FetchThread
from hillinfer_bench.rivals.landing import Landing
from hillinfer_bench.rivals.pooled_rows import PooledRows
from hillinfer_bench.rivals.row_products import RowProducts
from hillinfer_bench.rivals.selection import best_tokens, count, replayed, summed_weights
from hillinfer_bench.rivals.traffic import Traffic
from hillinfer_model.kernel_spec import GROUP_TOKENS


class H2OAllKeys(DriveRival):
    """Reads all keys at every step, selects by true attention weights, then reads values.

    Keys and values lie apart on the drive. M0 holds the first keys of every layer, which are then
    not read, and the values used last.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    def prepare(self) -> None:
        """Take buffers, then split what is left between keys and values; see `DriveRival`."""
        setup, shape = self.setup, self.setup.shape
        self._key_bytes = 2 * shape.kv_heads * shape.head_dim
        self.half_bytes = round_up(self._key_bytes, 64)
        self.keys = self.open_rows(self.half_bytes, "keys")
        self.values = self.open_rows(self.half_bytes, "values")
        self._half = self.meter.buffer(GROUP_TOKENS * self.half_bytes).reshape(GROUP_TOKENS, -1)
        self.stream = BlockStream(setup, self.keys, self.spilled, self.meter)
        self.products = RowProducts(shape, setup.block_rows)
        self.pool = PooledRows(setup, self.values, 1, self.meter)
        most = count(setup, setup.context)
        self._landing = Landing(self.meter, 0, 0, most, 1, self.half_bytes)
        self._logits = self.meter.tensor((shape.query_heads, setup.context), torch.float32)
        # A byte of keys saves one byte a step, a byte of values only where it is selected; but
        # where a value is less than a page, each one read costs a page, and values come first.
        free, group = self.meter.free_bytes, setup.units * GROUP_TOKENS * self.half_bytes
        values = self.pool.pool_bytes(most) if self.half_bytes < PAGE_BYTES else 0
        held = min((free - min(values, free // 2)) // group, self.keys.region_rows // GROUP_TOKENS)
        self.stream.first_token = self.held_tokens = held * GROUP_TOKENS
        self._held = self.meter.buffer(held * group).reshape(
            shape.layers, setup.batch, self.held_tokens, self.half_bytes
        )
        self.pool.take_pool(self.meter.free_bytes)
        self._thread = FetchThread(self._landing)

    def attended_token_bytes(self) -> float:
        """Return those of all keys and of the selected values; see `Rival`."""
        return (1 + self.setup.alpha) / 2 * self.setup.shape.token_bytes

    def describe(self) -> str:
        """Return what M0 went to."""
        return f"keys of {self.held_tokens} tokens and {self.pool.slots} values in DRAM"

    def spill(self, layer: int, row: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Write values, and keys that M0 does not hold; see `DriveRival`."""
        width = self._key_bytes
        if first < self.held_tokens:
            self._held[layer, row, first : first + len(rows), :width] = rows[:, :width]
        else:
            self._half[:, :width] = rows[:, :width]
            self.keys.write(layer, row, first, self._half)
        self._half[:, :width] = rows[:, width : 2 * width]
        self.values.write(layer, row, first, self._half)
        self.pool.put(layer, row, first, self._half)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Score all keys, then attend to the best; see `Rival`."""
        length, spilled = self.lengths[layer][row], self.spilled[layer][row]
        logits = self._logits[:, :length]
        at = 0
        for rows in self._key_rows(layer, row):
            own = logits[:, at : at + len(rows)]
            self.products.logits(query, scaling, rows, np.arange(len(rows)), own)
            at += len(rows)
        positions = best_tokens(self.setup, summed_weights(logits))
        positions = replayed(self.setup, layer, row, length, positions)
        cold = positions[positions < spilled]
        weights = torch.softmax(logits[:, torch.from_numpy(positions)], -1)
        tail = self.tail(layer, row)
        out = torch.zeros(len(query), query.shape[-1])
        self.products.add_weighted(
            weights[:, len(cold) :], tail, positions[len(cold) :] - spilled, out, self._key_bytes
        )
        fetch = self._thread.start(lambda memory: self.pool.fetch(layer, row, cold, memory))
        for fetched in self._thread.pieces(fetch):
            at = 0
            for rows, chosen in fetched.parts:
                order = torch.from_numpy(fetched.order[at : at + len(chosen)])
                self.products.add_weighted(weights[:, order], rows, chosen, out)
                at += len(chosen)
        return out.reshape(query.shape).to(query.dtype)

    def traffic(self) -> Traffic:
        """Return the totals, a block being read ahead included; see `Rival`."""
        self.stream.wait()
        return super().traffic()

    def close(self) -> None:
        """Wait for what is being read and give everything back; see `Rival`."""
        self._thread.close()
        self.stream.close()
        super().close()
        self.pool.close()
        self._landing.close()
        self._held = np.empty((0, 0, 0, 0), np.uint8)

    def _key_rows(self, layer: int, row: int) -> Iterator[NDArray[np.uint8]]:
        """Yield rows that begin with the keys of all tokens, in ascending position."""
        yield self._held[layer, row, : min(self.spilled[layer][row], self.held_tokens)]
        yield from self.stream.blocks(layer, row)
        yield self.tail(layer, row)
