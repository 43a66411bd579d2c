# SPDX-License-Identifier: Apache-2.0
"""A stored prefix comes back with the bits it had: into transformers' caches and HillInfer's."""

import errno

import pytest
import torch
from generation_runs import attached
from tiny_models import DTYPES, FAMILIES, TinyModel, prompts
from transformers import DynamicCache

from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import CacheUseError
from hillinfer.generate.answering import Generation, Sampling
from hillinfer.reuse.stored_prompts import StoredGeneration, StoredPrompts
from hillinfer.store.keys import Reuse
from hillinfer.store.pool_files import StoreFailedError, insist
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
    with attached(model, cold_dir, alpha=0.2) as hill, torch.no_grad():
        plain = answer(Generation(model, hill.new_cache(800), 64), ids)
        stored = StoredPrompts(store, model, reuse=Reuse.EXACT, chunk_tokens=64)
        for found in (0, 640):
            generation = StoredGeneration(model, hill.new_cache(800), 64, stored)
            assert answer(generation, ids) == plain
            assert generation.read_from_store.found_tokens == found
            assert generation.read_from_store.failure == ""
            generation.close()
        # Another document that begins alike.
        other = ids[:300] + ids_of(300, seed=7)
        expected = answer(Generation(model, hill.new_cache(800), 64), other)
        generation = StoredGeneration(model, hill.new_cache(800), 64, stored)
        assert answer(generation, other) == expected
        assert generation.read_from_store.found_tokens == 256
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


class TornDrive(DriveCalls):
    """A drive that gives no rows back once it is torn; what is said of them still comes."""

    is_torn = False

    def read_many(self, way, reads, address):
        if self.is_torn and reads.byte_counts.max() > 1 << 15:
            raise OSError(errno.EIO, "Input/output error")
        return super().read_many(way, reads, address)


@pytest.mark.parametrize("raising", [None, insist])
def test_a_drive_that_fails_is_a_miss_or_an_error_where_that_is_wanted(tmp_path, raising):
    model, ids = TinyModel(head_dim=32).build(), ids_of(200)
    calls = TornDrive()
    Store.create(tmp_path / "store", 64 * MIB)
    with Store(tmp_path / "store", raising=raising, calls=calls) as store:
        full = DynamicCache()
        Generation(model, full, 64).read(ids)
        stored = StoredPrompts(store, model)
        assert stored.keep(full, ids) == 192
        assert stored.load_into(DynamicCache(), ids) == 192
        calls.is_torn = True
        cache = DynamicCache()
        if raising is None:
            assert stored.load_into(cache, ids) == 0
            assert cache.get_seq_length() == 0
            assert store.counts.failures == 1
        else:
            with pytest.raises(StoreFailedError, match=r"the store failed: .*Input/output"):
                stored.load_into(cache, ids)
        calls.is_torn = False
        assert stored.load_into(DynamicCache(), ids) == 192


def test_a_token_that_is_read_alone_is_not_stored(store, cold_dir):
    model = TinyModel(head_dim=32, dtype=torch.bfloat16).build()
    with attached(model, cold_dir, alpha=0.2) as hill, torch.no_grad():
        for tokens, chunk, stored in ((128, 127, 64), (128, 64, 128), (192, 1, 0)):
            prompts_of = StoredPrompts(store, model, salt=f"{tokens} {chunk}".encode())
            generation = StoredGeneration(model, hill.new_cache(400), chunk, prompts_of)
            generation.read(ids_of(tokens))
            assert generation.read_from_store.stored_tokens == stored
            generation.close()


def test_a_store_that_fails_costs_time_and_no_answer(store, cold_dir):
    model = TinyModel(head_dim=32, dtype=torch.bfloat16).build()
    ids = ids_of(700)
    path = store.places.files[0][0]
    with attached(model, cold_dir, alpha=0.2) as hill, torch.no_grad():
        plain = answer(Generation(model, hill.new_cache(800), 64), ids)
        stored = StoredPrompts(store, model, reuse=Reuse.EXACT, chunk_tokens=64)
        answer(StoredGeneration(model, hill.new_cache(800), 64, stored), ids)
        # Zeros, as of a drive that lost what it was given.
        with path.open("r+b") as file:
            file.seek(128 * 1024 + 40 * 1024)
            file.write(bytes(8 << 20))
        generation = StoredGeneration(model, hill.new_cache(800), 64, stored)
        assert answer(generation, ids) == plain
        assert generation.read_from_store.found_tokens == 0
        assert "not as they were written" in generation.read_from_store.failure
    assert store.counts.quarantined_chunks == 1
