# SPDX-License-Identifier: Apache-2.0
"""llama.cpp through its Python binding: a GGUF file's weights, an FP16 KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llama_cpp
from worker_loop import Worker, serve


class LlamaCppWorker(Worker):
    """Feeds token ids, so no tokenizer is needed."""

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open `gguf`; `flash_attention` chooses between llama.cpp's two attention kernels."""
        self._llama = llama_cpp.Llama(
            model_path=request["gguf"],
            n_ctx=request["positions"],
            n_threads=request["threads"],
            n_threads_batch=request["threads"],
            flash_attn=request["flash_attention"],
            verbose=False,
        )
        return {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "weights": request["gguf_type"],
            "kv": "float16",
        }

    def tokens(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Read the prompt in llama.cpp's own batches, then decode."""
        self._llama.reset()
        self._llama.eval(prompt)
        for number in range(new_tokens):
            token = int(self._llama.sample(temp=0.0, repeat_penalty=1.0))
            yield token
            if number < new_tokens - 1:
                self._llama.eval([token])


if __name__ == "__main__":
    serve(LlamaCppWorker())
