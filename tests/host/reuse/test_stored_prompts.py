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
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.pool_files import StoreFailedError, insist
from hillinfer.store.store import Store
from hillinfer.store_rules import StoreRules

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


class TornDrive(DriveCalls):
    """A drive that gives no rows back once it is torn; what is said of them still comes."""

    is_torn = False

    def read_many(self, way, reads, address):
        if self.is_torn and reads.byte_counts.max() > 1 << 15:
            raise OSError(errno.EIO, "Input/output error")
        return super().read_many(way, reads, address)


class WholeCache(DynamicCache):
    """An ordinary cache that is full when a prefix is loaded: its kind does not stream."""


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
        assert stored.load_into(WholeCache(), ids) == 192
        calls.is_torn = True
        cache = WholeCache()
        if raising is None:
            assert stored.load_into(cache, ids) == 0
            assert cache.get_seq_length() == 0
            # Pieces are read at once, and fail each.
            assert store.counts.failures >= 1
        else:
            with pytest.raises(StoreFailedError, match=r"the store failed: .*Input/output"):
                stored.load_into(cache, ids)
        calls.is_torn = False
        assert stored.load_into(WholeCache(), ids) == 192


def test_nothing_stays_leased_where_there_is_no_memory_to_load_into(store):
    model, ids = TinyModel(head_dim=32).build(), ids_of(200)
    full = DynamicCache()
    Generation(model, full, 64).read(ids)
    stored = StoredPrompts(store, model)
    assert stored.keep(full, ids) == 192
    with pytest.raises((MemoryError, OSError)):
        stored.load_into(DynamicCache(), ids, new_tokens=1 << 50)
    assert store.statistics()["leases"] == 0
    # The twin: there is room for less.
    assert stored.load_into(DynamicCache(), ids, new_tokens=1 << 10) == 192


def test_a_token_that_is_read_alone_is_not_stored(store, cold_dir):
    model = TinyModel(head_dim=32, dtype=torch.bfloat16).build()
    for tokens, chunk, stored in ((128, 127, 64), (128, 64, 128), (192, 1, 0)):
        salt = f"{tokens} {chunk}".encode()
        with attached(model, cold_dir, alpha=0.2, store=store, salt=salt) as hill, torch.no_grad():
            generation = Generation(model, hill.new_cache(400), chunk)
            generation.read(ids_of(tokens))
            assert generation.cache.read_from_store.stored_tokens == stored
            generation.close()


@torch.no_grad()
def test_a_prompt_that_is_refused_is_answered_and_asked_for_once(tmp_path, cold_dir):
    """What is not admitted lies in the cache's own files; the second prompt is stored."""
    model = TinyModel(head_dim=32).build()
    ids = ids_of(2200)
    Store.create(tmp_path / "store", 64 * MIB)
    StoreRules(admission="seen-once").write(tmp_path / "store")
    with attached(model, cold_dir, alpha=0.2) as hill:
        plain = answer(Generation(model, hill.new_cache(2300), 256), ids)
    with (
        Store(tmp_path / "store", raising=insist) as store,
        attached(model, cold_dir, alpha=0.2, store=store) as hill,
    ):
        for found, stored, refused in ((0, 0, 3), (0, 2176, 0), (2176, 0, 0)):
            generation = Generation(model, hill.new_cache(2300), 256)
            assert answer(generation, ids) == plain
            told = generation.cache.read_from_store
            assert (told.found_tokens, told.stored_tokens) == (found, stored)
            assert (told.refused_chunks, told.failure) == (refused, "")
            assert told.directory == str(tmp_path / "store")
            generation.close()
        assert store.counts.refused_chunks == 3
        assert store.statistics()["leases"] == 0


@torch.no_grad()
def test_a_chunk_that_the_cap_refuses_stays_in_the_own_files(tmp_path, cold_dir):
    model = TinyModel(head_dim=32).build()
    ids = ids_of(4000)
    Store.create(tmp_path / "store", 64 * MIB)
    with attached(model, cold_dir, alpha=0.2) as hill:
        plain = answer(Generation(model, hill.new_cache(4050), 256), ids)
    # Room for two or three of the four extents.
    StoreRules(max_writes_per_day=2 * MIB).write(tmp_path / "store")
    with (
        Store(tmp_path / "store", raising=insist) as store,
        attached(model, cold_dir, alpha=0.2, store=store) as hill,
    ):
        generation = Generation(model, hill.new_cache(4050), 256)
        assert answer(generation, ids) == plain
        told = generation.cache.read_from_store
        assert 0 < told.stored_tokens < 3968
        assert told.stored_tokens % 1024 == 0
        assert told.refused_chunks == 1
        generation.close()
        assert store.metrics()["hillinfer_store_written_day_bytes"] <= 2 * MIB


@torch.no_grad()
def test_a_write_that_fails_ends_a_strict_run(tmp_path, cold_dir):
    class FullDrive(DriveCalls):
        def pwrite(self, descriptor, data, offset):
            if len(data) > 1 << 13 and descriptor in own:
                raise OSError(errno.EIO, "Input/output error")
            return super().pwrite(descriptor, data, offset)

    own = set()
    model = TinyModel(head_dim=32, dtype=torch.bfloat16).build()
    ids = ids_of(700)
    Store.create(tmp_path / "store", 64 * MIB)
    with attached(model, cold_dir, alpha=0.2) as hill:
        plain = answer(Generation(model, hill.new_cache(800), 64), ids)

    def answered(generation, ids):
        tokens = answer(generation, ids)
        generation.cache.await_stored()
        return tokens

    for raising in (None, insist):
        with (
            Store(tmp_path / "store", raising=raising, calls=FullDrive()) as store,
            attached(model, cold_dir, alpha=0.2, store=store) as hill,
        ):
            own.update(file.descriptor for file in store.files)
            generation = Generation(model, hill.new_cache(800), 64)
            if raising is None:
                assert answered(generation, ids) == plain
                assert store.counts.failures == 1
            else:
                with pytest.raises(StoreFailedError, match="Input/output"):
                    answered(generation, ids)
            own.clear()
            generation.close()


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
