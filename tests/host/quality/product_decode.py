# SPDX-License-Identifier: Apache-2.0
"""Decoding through the product's own cache, with a record of what every layer was asked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hillinfer.engine.runtime import Runtime
from hillinfer.hf.attach import Attachment
from hillinfer.settings import Settings
from hillinfer_bench.quality.policies import LayerQueries, SelectionPolicy


@dataclass(frozen=True)
class Decoded:
    """What happened in each layer, and the logits of each step.

    `layers[i]` holds the queries of all steps and the keys that the cache's rows hold at the end;
    `sets[i][step]` is int64 of shape (sets, k).
    """

    layers: list[LayerQueries]
    sets: list[list[np.ndarray]]
    logits: torch.Tensor


@torch.no_grad()
def decode_through_cache(model, ids, first, cold_dir, **settings):
    """Read `ids` up to `first` as a prompt, then one by one through a `HillInferCache`."""
    asked, chosen = [], []

    class Recording(Runtime):
        def __init__(self, *given, **named):
            super().__init__(*given, **named, observe_selected=self.note)

        def note(self, layer, length, sets):
            chosen.append(sets)

        def attend_selected(self, layer, sequence, query, keys, scaling):
            attended = super().attend_selected(layer, sequence, query, keys, scaling)
            asked.append((query[:, 0].float().cpu().clone(), scaling, np.stack(chosen.pop())))
            return attended

    # What is compared chooses with the layer's own queries.
    chosen_settings = {"query": "true", "dram_budget": "256MiB", "cold_dir": cold_dir} | settings
    with Attachment(
        model, Settings().changed(**chosen_settings), open_runtime=Recording
    ) as attachment:
        cache = attachment.new_cache()
        model(torch.tensor([ids[:first]]), past_key_values=cache, logits_to_keep=1)
        logits = [
            model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
            for token in ids[first:]
        ]
        layers = cache.engine.runtime.shape.layers
        keys = [_stored_keys(cache, layer) for layer in range(layers)]
        cache.close()
    by_layer = [asked[layer :: len(keys)] for layer in range(len(keys))]
    layers = [
        LayerQueries(torch.stack([query for query, _, _ in steps]), own, steps[0][1])
        for steps, own in zip(by_layer, keys, strict=True)
    ]
    return Decoded(
        layers, [[sets for _, _, sets in steps] for steps in by_layer], torch.stack(logits)
    )


def only_sequence(cache):
    """Return the one sequence that a cache holds."""
    (sequence,) = cache.sequences
    return sequence


def _stored_keys(cache, layer):
    """Return the keys of all rows of the only sequence, (tokens, kv_heads, head_dim)."""
    sequence = only_sequence(cache)
    runtime = cache.engine.runtime
    positions = np.arange(sequence.lengths[layer])
    return torch.cat(
        [
            runtime.layout.keys(torch.from_numpy(rows)).clone()
            for rows in runtime.gather.stream(layer, sequence, positions)
        ]
    )


class Recorded(SelectionPolicy):
    """Passes another policy's sets on and keeps them, layer by layer."""

    def __init__(self, policy):
        super().__init__(policy.settings)
        self._policy = policy
        self.layers = []
        self.sets = []

    def select(self, layer):
        selected = self._policy.select(layer)
        self.layers.append(layer)
        self.sets.append(selected)
        return selected
