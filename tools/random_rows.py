# SPDX-License-Identifier: Apache-2.0
"""Makes random rows in the shape of a small Llama, to measure memory and time."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.engine.runtime import Runtime
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.scoring.native import NativeScorer

CHUNK = 1024
# KV heads, query heads, channels of a head: of Llama-3.2-3B (28 layers) and Llama-3.2-1B (16).
HEADS = {"3b": (8, 24, 128), "1b": (8, 32, 64)}


def model_shape(layers: int, max_positions: int, model: str = "3b") -> ModelShape:
    """Return the shape of so many layers of a model of `HEADS`."""
    kv_heads, query_heads, head_dim = HEADS[model]
    return ModelShape(
        layers=layers,
        kv_heads=kv_heads,
        query_heads=query_heads,
        head_dim=head_dim,
        stored_type=StoredType.BFLOAT16,
        max_positions=max_positions,
    )


def resident_bytes() -> int:
    """Return what this process holds in memory now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no RssAnon: this needs Linux")


class RandomRows:
    """A sequence of random rows that grows by chunks and by decode steps.

    Parameters
    ----------
    runtime
        Where they go.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        generator = torch.Generator().manual_seed(0)
        # Every chunk draws from the same numbers, turned by its own amount, so that drawing them
        # is not what takes the time.
        shape = runtime.shape
        drawn = torch.randn(2, shape.kv_heads, 2 * CHUNK, shape.head_dim, generator=generator)
        self._pool = drawn.bfloat16()
        # The same at every step: after the first, what is selected is hot.
        self._query = torch.randn(shape.query_heads, 1, shape.head_dim, generator=generator)
        self._scaling = shape.head_dim**-0.5
        self._sequence = runtime.open_sequence()
        settings = runtime.settings
        self._scorer = NativeScorer(kernel_spec(shape, settings), settings.scope)
        self._started_with = resident_bytes()

    @property
    def tokens(self) -> int:
        """Tokens stored so far."""
        return self._sequence.lengths[0]

    @property
    def growth_bytes(self) -> int:
        """By how much the process grew since the sequence was opened."""
        return resident_bytes() - self._started_with

    def store(self, count: int) -> None:
        """Store a chunk of at most 1,024 tokens in every layer."""
        start = self.tokens
        self.runtime.begin_step()
        for layer in range(self.runtime.shape.layers):
            turn = (start // CHUNK * 37 + layer * 101) % CHUNK
            keys, values = self._pool[:, :, turn : turn + count]
            self.runtime.append(layer, self._sequence, keys, values)
            self.runtime.code_full_segments(layer, self._sequence, keys)
        self._sequence.token_ids.extend([0] * count)
        if sys.stderr.isatty():
            print(f"\r{start + count} tokens", end="", file=sys.stderr)

    def step(self, number: int) -> None:
        """Take a decode step; the steps of different numbers bring different tokens."""
        self.runtime.begin_step()
        for layer in range(self.runtime.shape.layers):
            keys, values = self._pool[:, :, number : number + 1]
            self.runtime.append(layer, self._sequence, keys, values)
            self.runtime.attend_selected(layer, self._sequence, self._query, keys, self._scaling)
        self._sequence.token_ids.append(0)

    def score(self) -> None:
        """Score the shadow of every layer, and do nothing else of a step."""
        for layer in range(self.runtime.shape.layers):
            shadows = self.runtime.parts.shadow.shadows(layer, self._sequence)
            self._scorer.tuples(self._query[:, 0], self._scaling, shadows)
