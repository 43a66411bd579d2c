# SPDX-License-Identifier: Apache-2.0
"""HillInfer with everything in DRAM, in the same greedy loop as transformers' own caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers_worker import TransformersWorker
from worker_loop import serve

import hillinfer
from hillinfer.hf.projections.projection_attachment import ProjectionAttachment
from hillinfer.hf.projections.table import make_projections


class HillInferWorker(TransformersWorker):
    """`alpha` and `projections` come with the request to open."""

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load the model and attach."""
        facts = super().open(request | {"cache": "dynamic"})
        self._projections = ProjectionAttachment(
            self.model, make_projections(request["projections"])
        )
        self._attachment = hillinfer.attach(
            self.model, alpha=request["alpha"], dram_budget=request["dram_budget"]
        )
        settings = {name: request[name] for name in ("alpha", "projections", "dram_budget")}
        weights = "float16" if request["projections"] == "fp16" else facts["weights"]
        # Rows of float32 models are FP16 (docs/limitations.md).
        kv = "float16" if request["dtype"] == "float32" else request["dtype"]
        return facts | {"settings": settings, "weights": weights, "kv": kv}

    def tokens(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Go on as the loop does, and close the cache afterwards."""
        self._cache = None
        try:
            yield from super().tokens(prompt, new_tokens)
        finally:
            if self._cache is not None:
                self._cache.close()

    def new_cache(self, length: int) -> Any:
        """Return a HillInfer cache once attached."""
        if not hasattr(self, "_attachment"):
            return super().new_cache(length)
        self._cache = self._attachment.new_cache(expected_tokens=length)
        return self._cache


if __name__ == "__main__":
    serve(HillInferWorker())
