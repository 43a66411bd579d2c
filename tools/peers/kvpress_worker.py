# SPDX-License-Identifier: Apache-2.0
"""Reads a text with kvpress' transformers and saves what kvpress would keep of it.

A JSON object comes on standard input: `model` (a folder), `ids`, `removed` (shares) and `out` (a
file). Knows nothing of HillInfer: it runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

# What HillInfer calls them, and kvpress.
_PRESSES = {
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "snapkv": "SnapKVPress",
    "expected": "ExpectedAttentionPress",
}


def main() -> None:
    """Answer the one request."""
    import kvpress
    from kvpress.utils import compute_n_kept
    from transformers import AutoModelForCausalLM, DynamicCache

    request = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    seen: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        seen[module.layer_idx] = hidden, kwargs

    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.rotary_emb = model.model.rotary_emb
        attention.register_forward_pre_hook(note, with_kwargs=True)
    cache = DynamicCache()
    saved: dict[str, Any] = {"kept": {}}
    with torch.no_grad():
        model(torch.tensor([request["ids"]]), past_key_values=cache)
        for name, made in _PRESSES.items():
            press = getattr(kvpress, made)()
            for removed in request["removed"]:
                kept = []
                for attention, layer in zip(attentions, cache.layers, strict=True):
                    hidden, kwargs = seen[attention.layer_idx]
                    scores = press.score(attention, hidden, layer.keys, layer.values, None, kwargs)
                    count = compute_n_kept(layer.keys.shape[2], removed)
                    kept.append(scores.topk(count, dim=-1).indices[0])
                saved["kept"][f"{name} {removed}"] = torch.stack(kept)
    saved["keys"] = torch.stack([layer.keys[0] for layer in cache.layers])
    saved["values"] = torch.stack([layer.values[0] for layer in cache.layers])
    saved["hidden"] = torch.stack([seen[layer][0][0] for layer in range(len(attentions))])
    saved["rotary"] = torch.stack([part[0] for part in seen[0][1]["position_embeddings"]])
    torch.save(saved, request["out"])


if __name__ == "__main__":
    main()
