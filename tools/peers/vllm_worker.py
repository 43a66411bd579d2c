# SPDX-License-Identifier: Apache-2.0
"""vLLM's build for CPUs, one request at a time, stepped by hand to time every token."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from worker_loop import Worker, serve


class VllmWorker(Worker):
    """Every run begins with an empty prefix cache, so it reads its prompt."""

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load the model; vLLM reads its thread count from the environment before import."""
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            # Else it takes a thread per core and binds it, whatever was asked for.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(request["threads"]),
        }
        import torch
        import vllm

        self._vllm = vllm
        self._runs = 0
        self._llm = vllm.LLM(
            model=request["model"],
            # Prompts are token ids.
            skip_tokenizer_init=True,
            dtype=request["dtype"],
            max_model_len=request["positions"],
            # Positions that the model was not trained for have no other effect on time.
            hf_overrides={"max_position_embeddings": request["positions"]},
            enable_prefix_caching=True,
        )
        return {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "weights": request["dtype"],
            "compute": request["dtype"],
            "kv": request["dtype"],
            "settings": {"prefix_caching": "emptied before every run"},
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time a run that goes on with its own tokens, then ask for each token after the text's.

        vLLM decodes what it chose itself. The prefix cache has the prompt by then, so that each
        further token costs its last block alone.
        """
        self._llm.reset_prefix_cache()
        timed = super().run(request)
        prompt, follow = request["prompt"], request["follow"]
        chosen = [timed["tokens"][0]] + [
            next(self._decoded([*prompt, *follow[:count]], 1)) for count in range(1, len(follow))
        ]
        return timed | {"tokens": chosen}

    def tokens(self, prompt: Sequence[int], follow: Sequence[int]) -> Iterator[int]:
        """Step the engine and yield what each step brought; `follow` gives the number alone."""
        yield from self._decoded(prompt, len(follow))

    def _decoded(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        engine = self._llm.llm_engine
        self._runs += 1
        engine.add_request(
            str(self._runs),
            {"prompt_token_ids": list(prompt)},
            self._vllm.SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
            ),
        )
        known = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                ids = output.outputs[0].token_ids
                yield from ids[known:]
                known = len(ids)


if __name__ == "__main__":
    serve(VllmWorker())
