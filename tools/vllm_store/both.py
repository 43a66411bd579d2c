# SPDX-License-Identifier: Apache-2.0
"""One store for two engines: HillInfer opens what vLLM read, and vLLM loads what HillInfer read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hillinfer
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.store.store import Store
from vllm_store.engines import ENGINE_BLOCK_TOKENS, Runs, store_transfer

_CHUNK = 1024
_STORE_BYTES = 4 * 10**9


@dataclass(frozen=True)
class _Answer:
    """What HillInfer answered.

    Parameters
    ----------
    tokens
        Greedy ones.
    logits
        That the first of them was taken from.
    found, made_by, not_accepted
        What the store did.
    seconds
        To the first token.
    """

    tokens: list[int]
    logits: torch.Tensor
    found: int
    made_by: str
    not_accepted: str
    seconds: float


def both_report(runs: Runs, folder: Path) -> dict[str, Any]:
    """Return what each engine makes of the other one's rows.

    Parameters
    ----------
    runs
        Of vLLM, with the prompt.
    folder
        Where stores are made.
    """
    ids, cold = json.loads(runs.ids.read_text()), folder / "cold"
    theirs, ours = folder / "theirs", folder / "ours"
    cold.mkdir()
    Store.create(ours, _STORE_BYTES)
    model = AutoModelForCausalLM.from_pretrained(runs.installed.model, dtype=torch.bfloat16).eval()
    asked = _Asking(model, ids, runs.answer_tokens, cold)
    print("vLLM reads the prompt and stores it", flush=True)
    # Compiled as little as those that load: both round alike.
    [computed] = runs.ask(store_transfer(theirs), is_eager=True)["answers"]
    print("HillInfer opens what vLLM read, and reads the prompt by itself", flush=True)
    opened = asked.of(theirs, ("vllm",))
    again = asked.of(theirs, ("vllm",))
    unasked = asked.of(theirs, ())
    print("HillInfer reads the prompt and stores it; vLLM loads it", flush=True)
    own = asked.of(ours, ("vllm",))
    transfer = store_transfer(ours)
    transfer["kv_connector_extra_config"]["accept"] = "hillinfer"
    [loaded] = runs.ask(transfer, is_eager=True)["answers"]
    least = (len(ids) - 1) // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS
    errors = [
        text
        for is_wrong, text in (
            (opened.made_by != "vllm", f"vLLM's rows were not opened: {opened.not_accepted}"),
            (opened.found < least, f"{opened.found} tokens of vLLM were opened, not {least}"),
            (again.tokens != opened.tokens, "other tokens when they were opened again"),
            (unasked.found, "vLLM's rows were opened unasked"),
            (loaded["store"].get("accepted_tokens", 0) < least, "vLLM did not load our rows"),
        )
        if is_wrong
    ]
    return {
        "label": "measured on this machine",
        "tokens": len(ids),
        "type": "bfloat16",
        "threads": runs.threads,
        "hillinfer_opens_vllm": {
            "found_tokens": opened.found,
            "tokens_equal": opened.tokens == own.tokens,
            "kl": _kl(own.logits, opened.logits),
            "first_token_seconds": opened.seconds,
            "recompute_seconds": own.seconds,
        },
        "vllm_loads_hillinfer": {
            "accepted_tokens": loaded["store"].get("accepted_tokens"),
            "tokens_equal": loaded["tokens"] == computed["tokens"],
            "most_log_probability_apart": max(
                abs(one - other)
                for one, other in zip(loaded["logprobs"], computed["logprobs"], strict=True)
            ),
            "first_token_seconds": loaded["first_token_seconds"],
            "recompute_seconds": computed["first_token_seconds"],
        },
        "engines_equal": own.tokens == computed["tokens"],
        "errors": errors,
    }


@dataclass(frozen=True)
class _Asking:
    """Has HillInfer answer one prompt.

    Parameters
    ----------
    model, ids
        Which answers what.
    tokens
        Of an answer.
    cold
        Directory for caches.
    """

    model: Any
    ids: list[int]
    tokens: int
    cold: Path

    def of(self, store: Path, accept: Sequence[str]) -> _Answer:
        """Return the answer where a store is beneath."""
        chosen = {"cold_dir": self.cold, "dram_budget": "1GiB"}
        with hillinfer.attach(self.model, store=store, accept=accept, **chosen) as attached:
            cache = attached.new_cache(len(self.ids) + self.tokens)
            began = time.perf_counter()
            generation = Generation(self.model, cache, _CHUNK)
            generation.read(self.ids)
            seconds, logits = time.perf_counter() - began, generation.logits.float()
            made = list(generation.decode(Sampling(), self.tokens, frozenset()))
            told = cache.read_from_store
            generation.close()
        return _Answer(made, logits, told.found_tokens, told.made_by, told.not_accepted, seconds)


def _kl(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the KL divergence of a distribution from another one, in nats."""
    logs = [torch.log_softmax(logits.double(), -1) for logits in (one, other)]
    return float((logs[0].exp() * (logs[0] - logs[1])).sum())
