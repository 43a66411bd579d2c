# SPDX-License-Identifier: Apache-2.0
"""A stored prefix comes back with the bits it had: into transformers' caches and HillInfer's."""

import pytest
import torch
from generation_runs import attached
from tiny_models import DTYPES, FAMILIES, TinyModel, prompts
from transformers import DynamicCache

from hillinfer.errors import CacheUseError
from hillinfer.generate.answering import Generation, Sampling
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store

MIB = 1 << 20
NO_STOPS = frozenset()


@pytest.fixture
def store(tmp_path):
    Store.create(tmp_path / "store", 64 * MIB)
    with Store(tmp_path / "store") as opened:
        yield opened


def ids_of(tokens, seed=0):
    ids, _ = prompts([tokens])
    return [(one + seed) % 60 for one in ids[0].tolist()]


def answer(generation, ids, tokens=8):
    generation.read(ids)
    return list(generation.decode(Sampling(), tokens, NO_STOPS))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_an_ordinary_cache_gets_the_bits_it_would_compute(store, family, dtype):
    model = TinyModel(
        family, dtype=dtype, head_dim=32, **({"heads": "mha"} if family == "opt" else {})
    ).build()
    ids = ids_of(200)
    full = DynamicCache()
    Generation(model, full, 64).read(ids)
    stored = StoredPrompts(store, model)
    assert stored.keep(full, ids) == 192
    cache = DynamicCache()
    assert stored.load_into(cache, ids) == 192
    for own, other in zip(cache.layers, full.layers, strict=True):
        assert torch.equal(own.keys, other.keys[:, :, :192])
        assert torch.equal(own.values, other.values[:, :, :192])
        # The twin: one bit makes a difference.
        bits = own.keys.view(torch.int16).clone()
        bits[0, 0, 5, 3] ^= 1
        assert not torch.equal(bits, other.keys[:, :, :192].contiguous().view(torch.int16))


def test_a_generation_goes_on_from_the_store(store, cold_dir):
    model = TinyModel(head_dim=32, dtype=torch.bfloat16).build()
    ids = ids_of(700)
    # Another document that begins alike.
    other = ids[:300] + ids_of(300, seed=7)
    with attached(model, cold_dir, alpha=0.2) as hill:
        plain = answer(Generation(model, hill.new_cache(800), 64), ids)
        expected = answer(Generation(model, hill.new_cache(800), 64), other)
    with attached(model, cold_dir, alpha=0.2, store=store, reuse="exact") as hill:
        for found in (0, 640):
            generation = Generation(model, hill.new_cache(800), 64)
            assert answer(generation, ids) == plain
            assert generation.cache.read_from_store.found_tokens == found
            assert generation.cache.read_from_store.failure == ""
            generation.close()
        generation = Generation(model, hill.new_cache(800), 64)
        assert answer(generation, other) == expected
        assert generation.cache.read_from_store.found_tokens == 256
    assert store.counts.failures == 0


def test_what_another_model_stored_is_not_found(store):
    ids = ids_of(200)
    one, other = (TinyModel(head_dim=32, seed=seed).build() for seed in (1, 2))
    cache = DynamicCache()
    Generation(one, cache, 64).read(ids)
    StoredPrompts(store, one).keep(cache, ids)
    assert StoredPrompts(store, one).load_into(DynamicCache(), ids) == 192
    assert StoredPrompts(store, other).load_into(DynamicCache(), ids) == 0
    assert StoredPrompts(store, one, salt=b"other").load_into(DynamicCache(), ids) == 0


def test_a_cache_that_holds_tokens_is_refused(store):
    model, ids = TinyModel(head_dim=32).build(), ids_of(100)
    cache = DynamicCache()
    Generation(model, cache, 64).read(ids)
    with pytest.raises(CacheUseError, match="holds 100 tokens: give a new one"):
        StoredPrompts(store, model).load_into(cache, ids)


def test_a_store_that_fails_costs_time_and_no_answer(store, cold_dir):
    model = TinyModel(head_dim=32, dtype=torch.bfloat16).build()
    ids = ids_of(700)
    path = store.places.files[0][0]
    with attached(model, cold_dir, alpha=0.2) as hill:
        plain = answer(Generation(model, hill.new_cache(800), 64), ids)
    with attached(model, cold_dir, alpha=0.2, store=store, reuse="exact") as hill:
        answer(Generation(model, hill.new_cache(800), 64), ids)
        # Zeros, as of a drive that lost what it was given.
        with path.open("r+b") as file:
            file.seek(128 * 1024 + 40 * 1024)
            file.write(bytes(8 << 20))
        generation = Generation(model, hill.new_cache(800), 64)
        assert answer(generation, ids) == plain
        told = generation.cache.read_from_store
        assert told.found_tokens == 0
        assert "not as they were written" in told.failure
    assert store.counts.quarantined_chunks == 1
