# SPDX-License-Identifier: Apache-2.0
"""H2O in two forms: it drops rows, or ranks by all keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.errors import CacheUseError
from hillinfer_bench.rivals.block_attention import (
    RowProducts,
    best_tokens,
    count,
    head_logits,
    replayed,
    summed_weights,
)
from hillinfer_bench.rivals.drive_rows import BlockStream, DriveRival, Landing
from hillinfer_bench.rivals.pooled_rows import FetchThread, PooledRows
from hillinfer_bench.rivals.rival import Rival, RivalSetup, Traffic
from hillinfer_model.kernel_spec import GROUP_TOKENS

# In `describe`: why more than the budget was held before the first step.
HELD_PROMPT = "all of it held until then"


class H2ODrop(Rival):
    """Keeps k tokens per KV head: sinks, recent ones and those with the largest summed weights.

    Weights are summed over all queries seen: those given to `observe`, then every step's. Where no
    model read the prompt and a benchmark replays selections, the set replayed first takes the
    place of weights. Held tokens fill the first slots, in any order; the last slot's token moves to
    where one leaves.

    Parameters
    ----------
    setup
        See `Rival`.

    Attributes
    ----------
    values, weights
        Of each slot: the held token's values, (layers, batch, kv_heads, slots, head_dim), and its
        summed weights, float32.
    """

    holds_prompt: ClassVar[bool] = True

    def __init__(self, setup: RivalSetup) -> None:
        super().__init__(setup)
        shape, kind = setup.shape, self.layout.stored_type
        # One slot more: a token comes before the one that leaves for it is known.
        self.slots = count(setup, setup.context) + 1
        size = (shape.layers, setup.batch, shape.kv_heads, self.slots)
        self._keys = self.meter.tensor((*size, shape.head_dim), kind)
        self.values = self.meter.tensor((*size, shape.head_dim), kind)
        self.weights = self.meter.tensor(size, torch.float32)
        self._positions = self.meter.tensor(size, torch.int32)
        self._logits = self.meter.tensor((shape.query_heads, self.slots), torch.float32)
        self._seen = (
            f"prompt not observed before the first step ({HELD_PROMPT}): recent tokens kept"
        )
        self._held = [[0] * setup.batch for _ in range(shape.layers)]
        self._prompts: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def positions(self, layer: int, row: int) -> torch.Tensor:
        """Return which tokens are held, int32 (kv_heads, tokens), in no order."""
        return self._positions[layer, row, :, : self._held[layer][row]]

    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold the prompt until it is observed, or until the first step; see `Rival`.

        Counted, but not refused: before the prompt was observed nothing can be dropped.
        """
        if self._held[layer][row]:
            raise CacheUseError(
                f"layer {layer} of sequence {row} has dropped tokens already: fill the whole "
                "prompt before observe and before the first step"
            )
        self.grow(layer, row, keys, values)
        self.meter.hold_beyond(keys.nbytes + values.nbytes)
        self._prompts.setdefault((layer, row), []).append((keys.clone(), values.clone()))

    def observe(self, layer: int, row: int, queries: torch.Tensor, scaling: float) -> None:
        """Sum up the weights of the prompt's last queries and drop what is light; see `Rival`."""
        if (layer, row) not in self._prompts:
            return
        self._seen = f"last {queries.shape[1]} queries of the prompt observed ({HELD_PROMPT})"
        keys, _ = self._prompt(layer, row)
        heads, tokens, _ = keys.shape
        weights = torch.zeros(heads, tokens)
        for i in range(queries.shape[1]):
            seen = tokens - queries.shape[1] + i + 1
            logits = torch.empty(len(queries), seen)
            for block in self._cut(seen):
                head_logits(queries[:, i : i + 1], keys[:, block], scaling, logits[:, block])
            weights[:, :seen] += torch.softmax(logits, -1).reshape(heads, -1, seen).sum(1)
        self._settle(layer, row, weights)

    def append(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put one token into the free slot; see `Rival`."""
        if (layer, row) in self._prompts:
            self._settle(layer, row, self._unobserved(layer, row).expand(len(keys), -1))
        self._make_room(layer, row, self.slots - 1)
        position, slot = self.grow(layer, row, keys, values), self._held[layer][row]
        self._keys[layer, row, :, slot] = keys[:, 0]
        self.values[layer, row, :, slot] = values[:, 0]
        self.weights[layer, row, :, slot] = 0
        self._positions[layer, row, :, slot] = position
        self._held[layer][row] = slot + 1

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what is held, add up weights and drop the lightest; see `Rival`."""
        held = self._held[layer][row]
        keys, values = self._keys[layer, row], self.values[layer, row]
        logits = self._logits[:, :held]
        for block in self._cut(held):
            head_logits(query, keys[:, block], scaling, logits[:, block])
        weights = torch.softmax(logits, -1).reshape(len(keys), -1, held)
        out = torch.zeros(len(keys), weights.shape[1], query.shape[-1])
        for block in self._cut(held):
            out += torch.matmul(weights[:, :, block], values[:, block].float())
        self.weights[layer, row, :, :held] += weights.sum(1)
        self._make_room(layer, row, count(self.setup, self.lengths[layer][row]))
        return out.reshape(query.shape).to(query.dtype)

    def describe(self) -> str:
        """Return by what its prompts were cut, and that they were held whole before."""
        return self._seen

    def close(self) -> None:
        """Give the memory back; see `Rival`."""
        self.meter.release(self.meter.traffic().dram_bytes)
        self._keys = self.values = self.weights = self._positions = torch.empty(0)
        self._prompts = {}

    def _unobserved(self, layer: int, row: int) -> torch.Tensor:
        """Return weights of a prompt that nobody observed: of all tokens alike, the recent stay."""
        length = self.lengths[layer][row]
        weights = torch.arange(length) * 1e-30
        if self.setup.selections is not None:
            self._seen = (
                f"prompt not observed before the first step ({HELD_PROMPT}): "
                "the set replayed first kept"
            )
            first = self.setup.selections(layer, row, length + 1)
            weights[torch.from_numpy(first[first < length])] = 1.0
        return weights

    def _cut(self, tokens: int) -> list[slice]:
        edges = [*range(0, tokens, self.setup.block_rows), tokens]
        return [slice(*pair) for pair in pairwise(edges)]

    def _prompt(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = zip(*self._prompts[layer, row], strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def _settle(self, layer: int, row: int, weights: torch.Tensor) -> None:
        """Keep k tokens of a prompt by their weights, (kv_heads, tokens), and drop the others."""
        keys, values = self._prompt(layer, row)
        heads, tokens, head_dim = keys.shape
        held = count(self.setup, tokens)
        ranked = weights.clone()
        ranked[:, : self.setup.kept_sinks] = torch.inf
        ranked[:, max(0, tokens - self.setup.kept_recent) :] = torch.inf
        best = ranked.topk(held, 1).indices
        wide = best[..., None].expand(heads, held, head_dim)
        self._keys[layer, row, :, :held] = keys.gather(1, wide)
        self.values[layer, row, :, :held] = values.gather(1, wide)
        self.weights[layer, row, :, :held] = weights.gather(1, best)
        self._positions[layer, row, :, :held] = best.int()
        self._held[layer][row] = held
        del self._prompts[layer, row]
        self.meter.release(keys.nbytes + values.nbytes)

    def _make_room(self, layer: int, row: int, most: int) -> None:
        """Drop the lightest tokens of each head until no more than `most` are held."""
        setup, length = self.setup, self.lengths[layer][row]
        while self._held[layer][row] > most:
            last = self._held[layer][row] - 1
            parts = [self._keys, self.values, self.weights, self._positions]
            keys, values, weights, positions = (part[layer, row] for part in parts)
            held = positions[:, : last + 1]
            kept = (held < setup.kept_sinks) | (held >= length - setup.kept_recent)
            lightest = weights[:, : last + 1].masked_fill(kept, torch.inf).argmin(1)
            heads = torch.arange(len(lightest))
            for part in (keys, values, weights, positions):
                part[heads, lightest] = part[:, last]
            self._held[layer][row] = last


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
        self._landing = Landing(self.meter, 0, 0, most, 1, self.half_bytes, setup.piece_bytes)
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
