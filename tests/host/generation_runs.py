# SPDX-License-Identifier: Apache-2.0
"""Generating with HillInfer and with the ordinary cache, in the same way."""

from __future__ import annotations

from functools import partial

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import hillinfer
from hillinfer.devices.opening import DEVICES
from hillinfer.engine.runtime import Runtime
from hillinfer.hf.attach import Attachment
from hillinfer.settings import Settings

CHUNK = 64
# Few kept tokens and small blocks, so that short contexts already select, evict and read twice.
SETTINGS = {
    "alpha": 0.2,
    "kept_sinks": 2,
    "kept_recent": 6,
    "block_rows": 48,
    "dram_budget": "24MiB",
    "io_threads": 2,
}
# A few exact tokens, the others as codes; and a few more of them, which must change bits. The
# share decides up to 260 tokens of context where the floor is 13 or less.
CODED = {"exact": 0.05, "exact_floor": 10}
MORE_EXACT = {"exact_floor": 14}
# Largest difference of logits, which spread by about 1, between the ordinary cache and HillInfer at
# α = 1. Both are right: they add the same terms up in another order, in the model's own type, and a
# value next to a rounding boundary of the stored type may fall to either side.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}


class _RoundedLayer(DynamicLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(_stored(key_states), _stored(value_states), *args, **kwargs)


class RoundedCache(DynamicCache):
    """The ordinary cache, with keys and values rounded to the type that HillInfer stores."""

    def __init__(self, config):
        super().__init__(config=config)
        self.layers = [_RoundedLayer() for _ in self.layers]


def _stored(states):
    if states.dtype != torch.float32:
        return states
    return states.clamp(-65504, 65504).to(torch.float16).to(torch.float32)


def attached(model, cold_dir, devices=None, **changes):
    """Attach with the settings of these tests, changed as given, and devices beside the host's."""
    if devices is not None:
        opened = partial(Runtime, devices={**DEVICES, **devices})
        return attached_with(model, cold_dir, {"open_runtime": opened}, **changes)
    return hillinfer.attach(model, cold_dir=cold_dir, **(SETTINGS | changes))


def with_streamed_shadows(*given, shadow_limit_bytes, **named):
    """Open a runtime that keeps no full shadow in DRAM, whatever there is room for."""
    return Runtime(*given, shadow_limit_bytes=0, **named)


def attached_with(model, cold_dir, given, **changes):
    """Attach so with something in the place of a part of the attachment, by its name."""
    settings = Settings().changed(cold_dir=cold_dir, **(SETTINGS | changes))
    return Attachment(model, settings, **given)


@torch.no_grad()
def run(model, cache, ids, mask=None, new_tokens=10, **options):
    """Generate greedily, by chunks of 64, and return transformers' output with its logits."""
    options = {"do_sample": False, "prefill_chunk_size": CHUNK, "pad_token_id": 0} | options
    return model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def ordinary(model, ids, mask=None, new_tokens=10, **options):
    """Generate with the ordinary cache, rounded as HillInfer stores."""
    return run(model, RoundedCache(model.config), ids, mask, new_tokens, **options)


def logits(output):
    """Return the logits of every new token, float32 (new tokens, batch, vocabulary)."""
    return torch.stack(output.logits).float()


def bits(output):
    """Return the logits as integers, so that equality means equal bits."""
    stacked = torch.stack(output.logits)
    return stacked.view(torch.int32 if stacked.dtype == torch.float32 else torch.int16)


class SelectionLog:
    """Lists the sets that caches select: (layer-wise in call order) lists of positions."""

    def __init__(self):
        self.sets = []
        self.lengths = []

    def attached(self, model, cold_dir, **changes):
        """Attach with the settings of these tests, changed as given, and list what is selected."""
        observed = partial(Runtime, observe_selected=self.note)
        return attached_with(model, cold_dir, {"open_runtime": observed}, **changes)

    def note(self, layer, length, sets):
        """Take the sets of a layer that attention is about to see, or has just seen."""
        self.sets.append([positions.tolist() for positions in sets])
        self.lengths.append(length)
