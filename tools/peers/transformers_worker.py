# SPDX-License-Identifier: Apache-2.0
"""Transformers with its own caches: dynamic, static, or quantised by quanto or hqq."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from step_parts import StepParts
from worker_loop import Worker, serve

_CHUNK_TOKENS = 1024


class TransformersWorker(Worker):
    """A greedy loop around the model's forward pass."""

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load the model in `dtype`; `cache` is dynamic, static, quanto or hqq.

        Weights that were rounded to `dtype` are computed with in `compute` where that is given.
        """
        torch.set_num_threads(request["threads"])
        self.kind = request["cache"]
        compute = request.get("compute", request["dtype"])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            request["model"], dtype=getattr(torch, request["dtype"]), local_files_only=True
        )
        self.model = model.to(getattr(torch, compute)).eval()
        quantised = self.kind in ("quanto", "hqq")
        # A chunk more would quantise all of a quantised cache once more; it is made for one pass.
        self._chunk = request["positions"] if quantised else _CHUNK_TOKENS
        self.new_cache(8)
        return {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "weights": request["dtype"],
            "compute": compute,
            "kv": "int4" if quantised else compute,
            "settings": {"cache": self.kind, "prefill_chunk": self._chunk},
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Add the parts of `profiled_steps` more steps, in milliseconds."""
        self._profiled, self._parts = request.get("profiled_steps", 0), None
        return super().run(request) | {"parts": self._parts}

    def new_cache(self, length: int) -> Any:
        """Return an empty cache for so many tokens."""
        config = self.model.config
        if self.kind == "static":
            return transformers.StaticCache(config=config, max_cache_len=length)
        if self.kind == "dynamic":
            return transformers.DynamicCache(config=config)
        return transformers.QuantizedCache(backend=self.kind, config=config)

    @torch.no_grad()
    def tokens(self, prompt: Sequence[int], follow: Sequence[int]) -> Iterator[int]:
        """Read in chunks, then decode."""
        cache = self.new_cache(len(prompt) + len(follow) + self._profiled)
        ids = torch.tensor([prompt])
        for start in range(0, len(prompt), self._chunk):
            token = self._next(ids[:, start : start + self._chunk], cache)
        yield token
        for one in follow[:-1]:
            yield self._next(torch.tensor([[one]]), cache)
        if self._profiled:
            last = torch.tensor([[follow[-1]]])
            with StepParts(self.model) as parts:
                self._parts = parts.milliseconds(lambda: self._next(last, cache), self._profiled)

    def _next(self, ids: torch.Tensor, cache: Any) -> int:
        output = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())


if __name__ == "__main__":
    serve(TransformersWorker())
