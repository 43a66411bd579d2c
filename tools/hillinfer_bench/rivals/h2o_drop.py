# SPDX-License-Identifier: Apache-2.0
"""Heavy hitters and recent tokens in memory, everything else dropped for ever (H2O)."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch

from hillinfer.errors import CacheUseError
from hillinfer_bench.rivals.rival import Rival
from hillinfer_bench.rivals.selection import count, head_logits
from hillinfer_bench.rivals.setup import RivalSetup

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
    """

    holds_prompt: ClassVar[bool] = True

    def __init__(self, setup: RivalSetup) -> None:
        super().__init__(setup)
        shape, kind = setup.shape, self.layout.stored_type
        # One slot more: a token comes before the one that leaves for it is known.
        self.slots = count(setup, setup.context) + 1
        size = (shape.layers, setup.batch, shape.kv_heads, self.slots)
        self._keys = self.meter.tensor((*size, shape.head_dim), kind)
        self._values = self.meter.tensor((*size, shape.head_dim), kind)
        self._weights = self.meter.tensor(size, torch.float32)
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
        self._values[layer, row, :, slot] = values[:, 0]
        self._weights[layer, row, :, slot] = 0
        self._positions[layer, row, :, slot] = position
        self._held[layer][row] = slot + 1

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what is held, add up weights and drop the lightest; see `Rival`."""
        held = self._held[layer][row]
        keys, values = self._keys[layer, row], self._values[layer, row]
        logits = self._logits[:, :held]
        for block in self._cut(held):
            head_logits(query, keys[:, block], scaling, logits[:, block])
        weights = torch.softmax(logits, -1).reshape(len(keys), -1, held)
        out = torch.zeros(len(keys), weights.shape[1], query.shape[-1])
        for block in self._cut(held):
            out += torch.matmul(weights[:, :, block], values[:, block].float())
        self._weights[layer, row, :, :held] += weights.sum(1)
        self._make_room(layer, row, count(self.setup, self.lengths[layer][row]))
        return out.reshape(query.shape).to(query.dtype)

    def describe(self) -> str:
        """Return by what its prompts were cut, and that they were held whole before."""
        return self._seen

    def close(self) -> None:
        """Give the memory back; see `Rival`."""
        self.meter.release(self.meter.traffic().dram_bytes)
        self._keys = self._values = self._weights = self._positions = torch.empty(0)
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
        self._values[layer, row, :, :held] = values.gather(1, wide)
        self._weights[layer, row, :, :held] = weights.gather(1, best)
        self._positions[layer, row, :, :held] = best.int()
        self._held[layer][row] = held
        del self._prompts[layer, row]
        self.meter.release(keys.nbytes + values.nbytes)

    def _make_room(self, layer: int, row: int, most: int) -> None:
        """Drop the lightest tokens of each head until no more than `most` are held."""
        setup, length = self.setup, self.lengths[layer][row]
        while self._held[layer][row] > most:
            last = self._held[layer][row] - 1
            parts = [self._keys, self._values, self._weights, self._positions]
            keys, values, weights, positions = (part[layer, row] for part in parts)
            held = positions[:, : last + 1]
            kept = (held < setup.kept_sinks) | (held >= length - setup.kept_recent)
            lightest = weights[:, : last + 1].masked_fill(kept, torch.inf).argmin(1)
            heads = torch.arange(len(lightest))
            for part in (keys, values, weights, positions):
                part[heads, lightest] = part[:, last]
            self._held[layer][row] = last
