# SPDX-License-Identifier: Apache-2.0
"""One process of vLLM that is asked a document's question, with or without the store beneath it.

python engine_run.py '{"model": ..., "ids": FILE, "transfer": KV transfer config or null, ...}'

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
    }
    import vllm
    from vllm.config import KVTransferConfig

    given, ranks = request["transfer"], request.get("ranks", 1)
    transfer = None if given is None else KVTransferConfig(**given)
    ids = json.loads(Path(request["ids"]).read_text())
    llm = vllm.LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=len(ids) + request["answer_tokens"] + 16,
        # Chunked: what a step stores is a part of the prompt.
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        tensor_parallel_size=ranks,
        # Several ranks would compile the same on few cores, for minutes.
        enforce_eager=ranks > 1 or request.get("is_eager", False),
        kv_transfer_config=transfer,
    )
    _ask(vllm, llm, "warm", ids[:_WARM_UP], None)
    answers = []
    for number in range(request.get("times", 1)):
        print("ASKING", flush=True)
        salt = request.get("salt")
        answers.append(_ask(vllm, llm, str(number), ids, salt, request["answer_tokens"]))
    # What these are about was counted before.
    rounds = [_round(vllm, llm, ids, number) for number in range(request.get("rounds", 0))]
    llm.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps({"answers": answers, "rounds": rounds}), flush=True)


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
    began, spent = time.perf_counter(), time.process_time()
    engine.add_request(name, prompt, chosen)
    first, busy, last, cached = None, None, None, None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last, cached = output.outputs[0], output.num_cached_tokens
            if first is None and last.token_ids:
                first, busy = time.perf_counter() - began, time.process_time() - spent
    assert last is not None
    return {
        "first_token_seconds": first,
        "processor_seconds": busy,
        "tokens": list(last.token_ids),
        "cached_tokens": cached,
        "logprobs": [next(iter(own.values())).logprob for own in last.logprobs],
        "store": _counts(),
    }


def _round(vllm: Any, llm: Any, ids: list[int], number: int) -> dict[str, float]:
    """Time a first token from the store, one from vLLM's own cache, and reading alone."""
    assert llm.llm_engine.reset_prefix_cache()
    stored = _ask(vllm, llm, f"stored {number}", ids, None)
    cached = _ask(vllm, llm, f"cached {number}", ids, None)
    assert stored["tokens"] == cached["tokens"]
    # It fills blocks of both, which the next round has forgotten.
    return _read_alone(ids, stored["cached_tokens"]) | {
        "stored": stored["first_token_seconds"],
        "busy_stored": stored["processor_seconds"],
        "compute": cached["first_token_seconds"],
        "busy_compute": cached["processor_seconds"],
    }


def _read_alone(ids: list[int], tokens: int) -> dict[str, float]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from hillinfer_vllm.step_plan import PlannedLoad, Prompt

    loads = get_kv_transfer_group().loads
    blocks = tuple(range(1, 1 + tokens // loads.block_tokens))
    plan = PlannedLoad("alone", Prompt(tuple(ids)), 0, tokens, blocks)
    began, spent = time.perf_counter(), time.process_time()
    loads.begin([plan])
    loads.wait(loads.layers[0])
    first, busy_first = time.perf_counter() - began, time.process_time() - spent
    failed = loads.end()
    read, busy = time.perf_counter() - began, time.process_time() - spent
    assert not failed
    return {
        "first_layer": first,
        "busy_first_layer": busy_first,
        "read": read,
        "busy_read": busy,
    }


def _counts() -> dict[str, float]:
    """Return what the connector of this process counted; of ranks, each has one of its own."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return {}
    totals: dict[str, float] = getattr(get_kv_transfer_group(), "totals", dict)()
    return totals


if __name__ == "__main__":
    main()
