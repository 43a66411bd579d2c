# SPDX-License-Identifier: Apache-2.0
"""One process of vLLM that is asked a document's question, with or without the store beneath it.

python engine_run.py '{"model": ..., "ids": FILE, "store": DIRECTORY or null, ...}'

It prints one line of JSON behind the word RESULT. Runs in the environment that has vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_WARM_UP = 40


def main() -> None:
    """Ask once or several times and print what came."""
    request = json.loads(sys.argv[1])
    # vLLM reads these before it is imported.
    os.environ |= {
        # In this process, which is what is killed.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(request["threads"]),
        "HF_HUB_OFFLINE": "1",
    }
    import vllm
    from vllm.config import KVTransferConfig

    transfer = None
    if request["store"] is not None:
        transfer = KVTransferConfig(
            kv_connector="HillInferStoreConnector",
            kv_connector_module_path="hillinfer_vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": request["store"], "store_size": "4GB"},
        )
    ids = json.loads(Path(request["ids"]).read_text())
    llm = vllm.LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=len(ids) + request["answer_tokens"] + 16,
        # Chunked: what a step stores is a part of the prompt.
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        tensor_parallel_size=request["ranks"],
        # Several ranks would compile the same on few cores, for minutes.
        enforce_eager=request["ranks"] > 1,
        kv_transfer_config=transfer,
    )
    _ask(vllm, llm, "warm", ids[:_WARM_UP], None)
    answers = []
    for number in range(request["times"]):
        print("ASKING", flush=True)
        salt = request.get("salt")
        answers.append(_ask(vllm, llm, str(number), ids, salt, request["answer_tokens"]))
    llm.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(answers), flush=True)


def _ask(
    vllm: Any, llm: Any, name: str, ids: list[int], salt: str | None, answer_tokens: int = 2
) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": ids}
    if salt is not None:
        prompt["cache_salt"] = salt
    chosen = vllm.SamplingParams(
        temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False, logprobs=1
    )
    engine = llm.llm_engine
    began = time.perf_counter()
    engine.add_request(name, prompt, chosen)
    first, last, cached = None, None, None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last, cached = output.outputs[0], output.num_cached_tokens
            if first is None and last.token_ids:
                first = time.perf_counter() - began
    assert last is not None
    return {
        "first_token_seconds": first,
        "tokens": list(last.token_ids),
        "cached_tokens": cached,
        "logprobs": [next(iter(own.values())).logprob for own in last.logprobs],
        "store": _counts(),
    }


def _counts() -> dict[str, float]:
    """Return what the connector of this process counted; of ranks, each has one of its own."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group().totals() if has_kv_transfer_group() else {}


if __name__ == "__main__":
    main()
