# SPDX-License-Identifier: Apache-2.0
"""What the golden model says of decode steps with coded tokens, and runs of an engine beside it."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Settings
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.coded_attention import CodedTokens, ExactRows, attend
from hillinfer_model.coded_segment import CodedSegment
from hillinfer_model.golden import GoldenModel
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.query_codes import scale_query
from hillinfer_model.selection import (
    exact_count,
    kept_positions,
    select_positions,
    selected_count,
)
from hillinfer_model.value_codes import encode_values, value_statistics

SHAPE = ModelShape(
    layers=2,
    kv_heads=2,
    query_heads=4,
    head_dim=24,
    stored_type=StoredType.FLOAT16,
    max_positions=10_000,
)
SETTINGS = Settings().changed(
    alpha=0.3, exact=0.05, exact_floor=20, kept_sinks=2, kept_recent=6, block_rows=64
)
SCALING = 0.3


def bits_of(states):
    """FP16 codes (tokens, heads, channels) of states (heads, tokens, channels)."""
    return states.half().transpose(0, 1).contiguous().view(torch.int16).numpy().view(np.uint16)


class Golden:
    """One layer's tokens as the golden model codes them, from the first step that scores."""

    def __init__(self, settings, shape=SHAPE):
        self.settings = settings
        self.shape = shape
        self.spec = kernel_spec(shape, settings)
        self.model = GoldenModel(self.spec, settings.scope)
        # Key and value statistics of each segment, taken once.
        self.taken = []

    def step(self, query, keys, values, flip=None, promoted=0):
        """Return the output of the newest token.

        `flip` is a position whose first value code is changed by one bit, and `promoted` of the
        best coded tokens are taken as exact ones: twins that must differ.
        """
        spec, settings, size = self.spec, self.settings, self.spec.segment_tokens
        key_bits, value_bits = bits_of(keys), bits_of(values)
        length = len(key_bits)
        segments, coded_values = [], []
        for number, base in enumerate(range(0, length, size)):
            own = slice(base, base + size)
            if number == len(self.taken):
                before = self.taken[-1] if number else (None, None)
                self.taken.append(
                    (
                        self.model.statistics(key_bits[own], base, before[0]),
                        value_statistics(value_bits[own], base, size, before[1]),
                    )
                )
            of_keys, of_values = self.taken[number]
            segments.append(CodedSegment(base, self.model.encode(key_bits[own], of_keys), of_keys))
            coded_values.append(encode_values(value_bits[own], of_values))
        if flip is not None:
            coded_values[flip // size].codes[flip % size, :, 0] ^= 1
        scores = self.model.score(query, SCALING, segments)
        kept = kept_positions(length, settings.kept_sinks, settings.kept_recent)
        count = selected_count(length, settings.alpha, settings.kept_tokens, settings.max_selected)
        exact = exact_count(length, settings.exact, settings.exact_floor, len(kept), count)
        weighing = replace(spec, rule=Rule.WEIGHT_SUM)
        scaled = scale_query(query, SCALING, weighing).reshape(query.shape)
        aligned, _ = GoldenModel(weighing, Scope.LAYER).aligned(query, SCALING, segments)
        group = self.shape.group_size
        out = np.zeros(query.shape, np.float32)
        for head, codes in enumerate(scores):
            own = select_positions(codes, count, kept)
            rows = select_positions(codes, min(count, exact + promoted), kept)
            rest = np.setdiff1d(own, rows)
            given = []
            for number, _ in enumerate(segments):
                inside = rest[rest // size == number]
                if len(inside):
                    at = inside % size
                    of = coded_values[number]
                    given.append(
                        CodedTokens(
                            aligned[:, inside],
                            segments[number].codes.invalid[at],
                            KeyCodes(of.codes[at], of.exponents[at]),
                            self.taken[number][1],
                        )
                    )
            of_rows = ExactRows(
                *(one.half().float().transpose(0, 1).numpy()[rows].copy() for one in (keys, values))
            )
            found = attend(scaled, of_rows, given)
            if len(scores) == 1:
                return found
            heads = slice(head * group, (head + 1) * group)
            out[heads] = found[heads]
        return out


@dataclass
class Text:
    """Random states of one sequence: its prompt, and tokens that are decoded."""

    prompt: int
    steps: int
    seed: int = 0
    shape: ModelShape = SHAPE

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        tokens, shape = self.prompt + self.steps, self.shape
        heads = shape.layers, shape.kv_heads, tokens, shape.head_dim
        # Channels of different size and with constant parts, as keys have them.
        means = torch.randn(shape.layers, shape.kv_heads, 1, shape.head_dim, generator=generator)
        stored = RowLayout(shape).stored_type
        self.keys = (torch.randn(heads, generator=generator) + 2 * means).to(stored)
        self.values = (torch.randn(heads, generator=generator) + means).to(stored)
        queries = shape.layers, self.steps, shape.query_heads, shape.head_dim
        self.queries = torch.randn(queries, generator=generator)

    def golden(self, settings, steps=None, **changed):
        """Outputs of steps in all layers, float32 (steps, layers, query_heads, head_dim).

        Of all, or of those that are listed: statistics are taken in the first of them.
        """
        layers = [Golden(settings, self.shape) for _ in range(self.shape.layers)]
        return np.stack(
            [
                np.stack(
                    [
                        own.step(
                            self.queries[layer, step].numpy(),
                            self.keys[layer, :, : self.prompt + step + 1],
                            self.values[layer, :, : self.prompt + step + 1],
                            **changed,
                        )
                        for layer, own in enumerate(layers)
                    ]
                )
                for step in (range(self.steps) if steps is None else steps)
            ]
        )

    def read(self, runtime, sequence, chunk=800, first=0):
        """Bring the prompt from a position on into a runtime, as a forward pass does."""
        for start in range(first, self.prompt, chunk):
            own = slice(start, min(start + chunk, self.prompt))
            runtime.begin_step()
            for layer in range(self.shape.layers):
                keys, values = self.keys[layer, :, own], self.values[layer, :, own]
                runtime.append(layer, sequence, keys, values)
                query = torch.zeros(self.shape.query_heads, keys.shape[1], self.shape.head_dim)
                runtime.attend_dense(layer, sequence, query, keys, values, SCALING)

    def decode(self, runtime, sequence, step, announced=False):
        """Return the output of one step in all layers."""
        at = slice(self.prompt + step, self.prompt + step + 1)
        runtime.begin_step()
        outs = []
        for layer in range(self.shape.layers):
            query = self.queries[layer, step][:, None]
            if announced:
                runtime.announce(layer, sequence, query, SCALING)
            keys, values = self.keys[layer, :, at], self.values[layer, :, at]
            runtime.append(layer, sequence, keys, values)
            outs.append(runtime.attend_selected(layer, sequence, query, keys, SCALING)[:, 0])
        return np.stack([one.numpy() for one in outs])


assert SETTINGS.key_mode is KeyMode.INT4
