# SPDX-License-Identifier: Apache-2.0
"""Ways in which an attached model reads prompts, each of which looks a store up by itself."""

from __future__ import annotations

import torch
from generation_runs import run
from tiny_models import prompts

from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling

NEW_TOKENS = 4


def ids_of(tokens=150, seed=0):
    """Return one prompt, (1, tokens)."""
    return prompts([tokens], seed)[0]


class Asked:
    """What a way gave: new tokens, and how many of the prompt's came from a store."""

    def __init__(self, tokens, *caches):
        self.tokens = tokens
        told = [cache.read_from_store for cache in caches]
        self.found = sum(one.found_tokens for one in told if one is not None)
        self.failures = [one.failure for one in told if one is not None and one.failure]
        for cache in caches:
            cache.close()


def by_generate(hill, **options):
    """Call transformers' own `generate`."""
    cache, ids = hill.new_cache(), ids_of()
    options = {"prefill_chunk_size": None, "new_tokens": NEW_TOKENS} | options
    return Asked(run(hill.model, cache, ids, **options).sequences[:, ids.shape[1] :], cache)


def by_samples(hill):
    torch.manual_seed(5)
    return by_generate(hill, do_sample=True, top_k=3, temperature=0.1, num_return_sequences=2)


def by_padded_batch(hill, **options):
    """Left-padded rows, two of which begin alike."""
    ids, mask = prompts([150, 90, 150])
    ids[2] = ids[0]
    ids[2, 140:] = ids[0, 140:].flip(0)
    cache = hill.new_cache()
    options = {"prefill_chunk_size": None, "new_tokens": NEW_TOKENS} | options
    return Asked(run(hill.model, cache, ids, mask, **options).sequences[:, 150:], cache)


@torch.no_grad()
def _greedy(model, cache, logits):
    tokens = []
    for _ in range(NEW_TOKENS):
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
        logits = model(tokens[-1], past_key_values=cache).logits
    return torch.cat(tokens, dim=1)


@torch.no_grad()
def by_forward(hill):
    """Pass the whole prompt in one forward pass that wants the last logits."""
    cache = hill.new_cache()
    logits = hill.model(ids_of(), past_key_values=cache, logits_to_keep=1).logits
    assert logits.shape[1] == 1
    return Asked(_greedy(hill.model, cache, logits), cache)


@torch.no_grad()
def by_own_chunks(hill):
    """Pass it in chunks, after asking what need not come."""
    cache, ids = hill.new_cache(), ids_of()
    found = cache.look_up(ids, chunk_tokens=64)
    for chunk in ids[:, found:].split(64, dim=1):
        logits = hill.model(chunk, past_key_values=cache, logits_to_keep=1).logits
    return Asked(_greedy(hill.model, cache, logits), cache)


def by_generation(hill):
    """Read and decode as the command does."""
    cache = hill.new_cache()
    generation = Generation(hill.model, cache, 64)
    generation.read(ids_of()[0].tolist())
    tokens = list(generation.decode(Sampling(), NEW_TOKENS, frozenset()))
    return Asked(torch.tensor([tokens]), cache)


@torch.no_grad()
def by_forks(hill):
    """Answer on two forks of a cache that has read its prompt."""
    cache, ids = hill.new_cache(), ids_of()
    logits = hill.model(ids, past_key_values=cache, logits_to_keep=1).logits
    forks = [cache.fork() for _ in range(2)]
    tokens = [_greedy(hill.model, fork, logits) for fork in forks]
    assert torch.equal(*tokens)
    return Asked(torch.cat(tokens), cache, *forks)


def by_joined_batch(hill):
    """Let caches without tokens read their prompts and answer together."""
    caches = [hill.new_cache() for _ in range(3)]
    ids, mask = prompts([150, 90, 150])
    ids[2] = ids[0]
    ids[2, 140:] = ids[0, 140:].flip(0)
    joined = hill.join(caches)
    out = run(hill.model, joined, ids, mask, NEW_TOKENS, prefill_chunk_size=64)
    return Asked(out.sequences[:, 150:], *caches)


WAYS = {
    "generate": by_generate,
    "chunked prefill": lambda hill: by_generate(hill, prefill_chunk_size=64),
    "chunks that end oddly": lambda hill: by_generate(hill, prefill_chunk_size=21),
    "beams": lambda hill: by_generate(hill, num_beams=3, num_return_sequences=2),
    "beams in chunks": lambda hill: by_generate(hill, num_beams=3, prefill_chunk_size=64),
    "samples": by_samples,
    "forward": by_forward,
    "own chunks": by_own_chunks,
    "generation": by_generation,
    "forks": by_forks,
    "padded batch": by_padded_batch,
    "padded batch in chunks": lambda hill: by_padded_batch(hill, prefill_chunk_size=64),
    "joined batch": by_joined_batch,
}
