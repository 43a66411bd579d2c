# SPDX-License-Identifier: Apache-2.0
"""vLLM's build for CPUs, one request at a time, stepped by hand to time every token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from worker_loop import Worker, serve


class VllmWorker(Worker):
    """Prefix caching is off: every run reads its prompt."""

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load the model; vLLM reads its thread count from the environment before import."""
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(request["threads"]),
            # Idle threads that spin take the core from whoever works.
            "KMP_BLOCKTIME": "0",
        }
        import vllm

        self._vllm = vllm
        self._runs = 0
        self._llm = vllm.LLM(
            model=request["model"],
            dtype=request["dtype"],
            max_model_len=request["positions"],
            enable_prefix_caching=False,
        )
        return {
            "versions": {"vllm": vllm.__version__},
            "weights": request["dtype"],
            "kv": request["dtype"],
        }

    def tokens(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Step the engine and yield what each step brought."""
        engine = self._llm.llm_engine
        self._runs += 1
        engine.add_request(
            str(self._runs),
            {"prompt_token_ids": prompt},
            self._vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True),
        )
        known = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                ids = output.outputs[0].token_ids
                yield from ids[known:]
                known = len(ids)


if __name__ == "__main__":
    serve(VllmWorker())
