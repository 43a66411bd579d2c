# SPDX-License-Identifier: Apache-2.0
"""llama.cpp through its Python binding: a GGUF file's weights, an FP16 KV cache."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
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
            type_k=llama_cpp.GGML_TYPE_F16,
            type_v=llama_cpp.GGML_TYPE_F16,
            verbose=True,
        )
        return {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "threads": llama_cpp.llama_n_threads(self._llama.ctx),
            "weights": request["gguf_type"],
            "compute": request["gguf_type"],
            "kv": "float16",
            "settings": {
                "flash_attention": request["flash_attention"],
                "prefill_chunk": self._llama.n_batch,
            },
        }

    def tokens(self, prompt: Sequence[int], follow: Sequence[int]) -> Iterator[int]:
        """Read the prompt in llama.cpp's own batches, then decode."""
        self._llama.reset()
        self._llama.eval(prompt)
        yield self._most_probable()
        for one in follow[:-1]:
            self._llama.eval([one])
            yield self._most_probable()

    def restore(self, request: dict[str, Any]) -> dict[str, Any]:
        """Save a slot of the first tokens as llama.cpp's server does, restore it, read the rest."""
        prompt, held = request["prompt"], request["held"]
        file, context = request["file"].encode(), self._llama.ctx
        if not Path(request["file"]).exists():
            self._llama.reset()
            self._llama.eval(prompt[:held])
            tokens = (llama_cpp.llama_token * held)(*prompt[:held])
            if not llama_cpp.llama_state_seq_save_file(context, file, 0, tokens, held):
                raise RuntimeError("the slot cannot be saved")
        self._llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), 1)
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        # Read from the drive, as after a restart.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        began = time.perf_counter()
        found, count = (llama_cpp.llama_token * held)(), ctypes.c_size_t()
        if not llama_cpp.llama_state_seq_load_file(
            context, file, 0, found, held, ctypes.byref(count)
        ):
            raise RuntimeError("the slot cannot be restored")
        self._llama.n_tokens = held
        self._llama.input_ids[:held] = prompt[:held]
        self._llama.eval(prompt[held:])
        token = self._most_probable()
        return {"ttft_seconds": time.perf_counter() - began, "tokens": [token]}

    def _most_probable(self) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self._llama.n_vocab(),)).argmax())


if __name__ == "__main__":
    serve(LlamaCppWorker())
