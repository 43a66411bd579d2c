# SPDX-License-Identifier: Apache-2.0
"""Shapes, prompts and the runs that the rivals' tests share."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from hillinfer.attention.kernels import MOST_GROUP_SIZE
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer_bench.rivals.rival import RivalSetup
from hillinfer_bench.rivals.table import make_rival

sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))
from exact_attention import exact_attention

SHAPE = ModelShape(
    layers=2,
    kv_heads=2,
    query_heads=4,
    head_dim=16,
    stored_type=StoredType.FLOAT16,
    max_positions=100_000,
)
MULTI_HEAD = replace(SHAPE, kv_heads=3, query_heads=3, head_dim=40)
WIDE = replace(SHAPE, kv_heads=8, query_heads=16, head_dim=128, layers=3)
# Rows of 16 KiB, as in the paper's shapes: whole pages, larger than the gaps that are read through.
PAPER = replace(SHAPE, kv_heads=32, query_heads=32, head_dim=128, layers=1)
# So many query heads of one KV head that the native library leaves them to torch.
LEFT_TO_TORCH = replace(SHAPE, kv_heads=1, query_heads=MOST_GROUP_SIZE + 1)
SCALING = 0.3


# Of one group each, so that a short context has several.
SMALL = {"block_bytes": 1, "window_bytes": 1}


def make_setup(cold_dir, shape=SHAPE, **changes):
    given = {"batch": 2, "context": 1000, "budget_bytes": 64 << 20, "alpha": 0.2, **SMALL}
    return RivalSetup(shape=shape, cold_dir=cold_dir, **(given | changes))


class Run:
    """One rival, by its name or its class, and the same keys and values in a place of their own."""

    def __init__(self, name, setup, prompt, seed=0, observed=4):
        self.setup, self.prompt = setup, prompt
        shape = setup.shape
        generator = torch.Generator().manual_seed(seed)
        size = (shape.layers, setup.batch, shape.kv_heads, setup.context, shape.head_dim)
        kind = torch.bfloat16 if shape.stored_type is StoredType.BFLOAT16 else torch.float16
        # Neighbours resemble each other, as tokens of a text do: chunks and pages then mean
        # something.
        drift = torch.randn(size, generator=generator).cumsum(3) * 0.15
        self.keys = (torch.randn(size, generator=generator) + drift).to(kind)
        self.values = torch.randn(size, generator=generator).to(kind)
        heads = (shape.layers, setup.batch, shape.query_heads, setup.context, shape.head_dim)
        self.queries = torch.randn(heads, generator=generator)
        self.length = prompt
        self.rival = make_rival(name, setup) if isinstance(name, str) else name(setup)
        for layer, row in self.units():
            # In two pieces, as a chunked prefill brings them.
            for piece in (slice(0, prompt // 3), slice(prompt // 3, prompt)):
                keys, values = self.keys[layer, row, :, piece], self.values[layer, row, :, piece]
                self.rival.fill(layer, row, keys, values)
            last = self.queries[layer, row, :, prompt - observed : prompt]
            self.rival.observe(layer, row, last, SCALING)

    def units(self):
        return [(i, j) for i in range(self.setup.shape.layers) for j in range(self.setup.batch)]

    def step(self, predicted=True):
        """Decode one token and return what attention gave, by layer and sequence."""
        rival, at = self.rival, self.length
        new = slice(at, at + 1)
        self.length += 1
        rival.begin_step()
        found = {}
        for layer in range(self.setup.shape.layers):
            if predicted and rival.wants_prediction:
                rival.predict(layer, self.queries[layer, :, :, new], SCALING)
            for row in range(self.setup.batch):
                keys, values = self.keys[layer, row, :, new], self.values[layer, row, :, new]
                rival.append(layer, row, keys, values)
            for row in range(self.setup.batch):
                query = self.queries[layer, row, :, new]
                found[layer, row] = rival.attend(layer, row, query, SCALING)
        return found

    def exact(self, layer, row, visible=None):
        """Attention of the newest query in float64 over everything, or what is visible."""
        length = self.length
        return exact_attention(
            self.queries[layer, row, :, length - 1 : length],
            self.keys[layer, row, :, :length],
            self.values[layer, row, :, :length],
            SCALING,
            visible,
        )[0]

    def wrong(self, found, layer, row):
        """Whether a result is off, or no number."""
        off = (found[layer, row].double() - self.exact(layer, row)).abs().max()
        return not off < 1e-3

    def error(self, found):
        """The largest difference of a step's results from attention over everything."""
        return max(
            float((found[unit].double() - self.exact(*unit)).abs().max()) for unit in self.units()
        )


def flip_on_drive(rows, layer, row, position, byte):
    """Change one bit of a row on the drive, past everything the rival holds in memory."""
    path = Path(f"/proc/self/fd/{rows.files[layer].descriptor}")
    with path.open("r+b", buffering=0) as file:
        at = (row * rows.region_rows + position) * rows.row_bytes + byte
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        # The exponent's highest bit: a value that nobody overlooks, or no number at all.
        file.write(bytes([old ^ 0x40]))
        os.fsync(file.fileno())
