# SPDX-License-Identifier: Apache-2.0
"""HillInfer with everything in DRAM, in the same greedy loop as transformers' own caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from transformers_worker import TransformersWorker
from worker_loop import serve

import hillinfer
from hillinfer.projections.attachment import ProjectionAttachment
from hillinfer.projections.ways import make_projections


class HillInferWorker(TransformersWorker):
    """`alpha`, `projections`, `query` and `dram_budget` come with the request to open."""

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load the model and attach."""
        facts = super().open(request | {"cache": "dynamic"})
        self._projections = ProjectionAttachment(
            self.model, make_projections(request["projections"])
        )
        self._attachment = hillinfer.attach(
            self.model,
            alpha=request["alpha"],
            dram_budget=request["dram_budget"],
            query=request["query"],
        )
        settings = self._attachment.settings
        weights = "float16" if request["projections"] == "fp16" else facts["weights"]
        # Rows of float32 models are FP16 (docs/limitations.md).
        kv = "float16" if facts["compute"] == "float32" else facts["compute"]
        return facts | {
            "versions": facts["versions"] | {"hillinfer": version("hillinfer")},
            "weights": weights,
            "kv": kv,
            "settings": {
                "alpha": settings.importance_rate,
                "rule": settings.rule,
                "scope": settings.scope,
                "query": settings.query,
                "projections": request["projections"],
                "dram_budget": request["dram_budget"],
                "prefill_chunk": facts["settings"]["prefill_chunk"],
            },
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Add the format of the shadow that the run's cache had."""
        return super().run(request) | {"shadow": self._shadow}

    def tokens(self, prompt: Sequence[int], follow: Sequence[int]) -> Iterator[int]:
        """Go on as the loop does, and close the cache afterwards.

        Raises
        ------
        ValueError
            Where rows were read from the drive: the row of the report says that none were.
        """
        self._cache = None
        try:
            yield from super().tokens(prompt, follow)
            if self._cache is not None and (cold := self._cold_rows()):
                raise ValueError(
                    f"{cold} rows were read from the drive, so dram_budget="
                    f"{self._attachment.settings.dram_budget} does not hold this context: raise it "
                    "in tools/peers/peer.py"
                )
        finally:
            if self._cache is not None:
                self._cache.close()

    def _cold_rows(self) -> int:
        return int(self._cache.statistics().cold_rows_read)

    def new_cache(self, length: int) -> Any:
        """Return a HillInfer cache once attached."""
        if not hasattr(self, "_attachment"):
            return super().new_cache(length)
        self._cache = self._attachment.new_cache(expected_tokens=length)
        # Of the runtime: the attachment's settings may leave the choice to each cache.
        self._shadow = self._cache._runtime.settings.key_mode.value
        return self._cache


if __name__ == "__main__":
    serve(HillInferWorker())
