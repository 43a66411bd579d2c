# SPDX-License-Identifier: Apache-2.0
"""Transformers with its own caches: dynamic, static, or quantised by quanto or hqq."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from worker_loop import Worker, serve

_CHUNK_TOKENS = 1024


class TransformersWorker(Worker):
    """A greedy loop around the model's forward pass."""

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load the model; `cache` is dynamic, static, quanto or hqq."""
        torch.set_num_threads(request["threads"])
        self.kind = request["cache"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            request["model"], dtype=getattr(torch, request["dtype"]), local_files_only=True
        ).eval()
        self.new_cache(8)
        return {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "weights": request["dtype"],
            "kv": "int4" if self.kind in ("quanto", "hqq") else request["dtype"],
        }

    def new_cache(self, length: int) -> Any:
        """Return an empty cache for so many tokens."""
        config = self.model.config
        if self.kind == "static":
            return transformers.StaticCache(config=config, max_cache_len=length)
        if self.kind == "dynamic":
            return transformers.DynamicCache(config=config)
        return transformers.QuantizedCache(backend=self.kind, config=config)

    @torch.no_grad()
    def tokens(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Read in chunks, then decode."""
        cache = self.new_cache(len(prompt) + new_tokens)
        ids = torch.tensor([prompt])
        for start in range(0, len(prompt), _CHUNK_TOKENS):
            token = self._next(ids[:, start : start + _CHUNK_TOKENS], cache)
        yield token
        for _ in range(new_tokens - 1):
            token = self._next(torch.tensor([[token]]), cache)
            yield token

    def _next(self, ids: torch.Tensor, cache: Any) -> int:
        output = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())


if __name__ == "__main__":
    serve(TransformersWorker())
