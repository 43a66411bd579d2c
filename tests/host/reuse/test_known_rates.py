# SPDX-License-Identifier: Apache-2.0
"""What follows a stored prefix is read the way that this machine's rates say is sooner."""

from contextlib import contextmanager

import pytest
import torch
from generation_runs import attached, run
from stored_ways import ids_of
from tiny_models import TinyModel

from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.model_prompts import KnownRates
from hillinfer.reuse.ways import NoRates
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.schedule.kept_windows import KeptWindows, WindowKey, single_passes
from hillinfer.schedule.windows import SlackTable
from hillinfer.store.store import Store

MIB = 1 << 20
TOKENS, FOUND = 150, 128
# Seconds of one layer for a token by itself, and bytes per second of the drive.
SLOW_DRIVE, SLOW_STEPS = (1e-4, 1e3), (1.0, 1e9)
WAYS = {"opened in place": SLOW_DRIVE, "streamed": SLOW_STEPS}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A store, and a user that has no rates."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Store.create(tmp_path / "store", 64 * MIB)
    return tmp_path / "store"


@pytest.fixture(scope="module")
def model():
    return TinyModel().build()


def key_of(place, model):
    shape = ModelShape.from_config(model.config, model.dtype)
    return WindowKey.of(torch.get_num_threads(), single_passes(place), shape)


def plant(place, model, step, rate):
    """Keep rates as if they had been measured."""
    kept = KeptWindows.of_user()
    kept.keep(key_of(place, model), SlackTable.measured(lambda new, before: step))
    kept.keep_drive(place, DriveRates((MIB,), (rate,), rate, 0.0))


def by_generate(model, cache, ids):
    return run(model, cache, ids, new_tokens=6, prefill_chunk_size=None).sequences


@torch.no_grad()
def by_forward(model, cache, ids):
    return _goes_on(model, cache, ids, model(ids, past_key_values=cache, logits_to_keep=1).logits)


@torch.no_grad()
def by_generation(model, cache, ids):
    generation = Generation(model, cache, 64)
    generation.read(ids[0].tolist())
    return torch.tensor([[*ids[0].tolist(), *generation.decode(Sampling(), 6, frozenset())]])


def singly(model, cache, ids):
    """Read what is behind the stored prefix token by token."""
    with torch.no_grad():
        run(model, cache, ids[:, :FOUND], new_tokens=1, prefill_chunk_size=None)
        for token in ids[0, FOUND:]:
            logits = model(token[None, None], past_key_values=cache).logits
        return _goes_on(model, cache, ids, logits)


def _goes_on(model, cache, ids, logits):
    for _ in range(6):
        token = logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        logits = model(token, past_key_values=cache).logits
    return ids


@contextmanager
def passes_of(model):
    """Yield how many tokens each pass brings, as they come."""
    passes = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _, given: passes.append(given[0].shape[1])
    )
    try:
        yield passes
    finally:
        hook.remove()


READERS = {"generate": by_generate, "forward": by_forward, "generation": by_generation}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("way", WAYS)
def test_an_attached_model_chooses_by_rates(place, model, cold_dir, way, reader):
    plant(place, model, *WAYS[way])
    ids, read = ids_of(TOKENS), READERS[reader]
    with attached(model, cold_dir) as hill:
        dense = read(model, hill.new_cache(), ids)
        alone = singly(model, hill.new_cache(), ids)
    # A hook belongs to what rows are stored under.
    with attached(model, cold_dir, store=place) as hill, passes_of(model) as passes:
        cache = hill.new_cache()
        first = read(model, cache, ids)
        assert cache.read_from_store.stored_tokens == FOUND
        cache.close()
        cache = hill.new_cache()
        passes.clear()
        again = read(model, cache, ids)
        told = cache.read_from_store
        cache.close()
    assert torch.equal(first, dense)
    assert (told.found_tokens, told.way, told.failure) == (FOUND, way, "")
    assert torch.equal(again, alone if way == "opened in place" else dense)
    (one,) = told.passes
    assert (one.before, one.tokens, one.way) == (FOUND, TOKENS - FOUND, way)
    streams, tokens = one.streamed_seconds, one.in_place_seconds
    assert (streams > tokens) is (way == "opened in place")
    assert "expected" in one.reason
    rest = TOKENS - FOUND
    expected = [1] * rest if way == "opened in place" else [rest]
    assert passes[: len(expected)] == expected
    assert set(passes[len(expected) :]) == {1}


def test_questions_behind_a_stored_document_are_chosen_for_by_rates(place, model, cold_dir):
    document, question = ids_of(TOKENS)[0].tolist(), ids_of(20, seed=3)[0].tolist()
    answers = {}
    for way, rates in WAYS.items():
        plant(place, model, *rates)
        with (
            attached(model, cold_dir, store=place) as hill,
            torch.no_grad(),
            passes_of(model) as passes,
        ):
            first = Generation(model, hill.new_cache(), 64)
            first.read(document)
            assert first.cache.read_from_store.failure == ""
            first.close()
            generation = Generation(model, hill.new_cache(), 64)
            generation.read(document)
            fork = generation.fork()
            passes.clear()
            fork.read(question)
            assert passes == ([1] * 20 if way == "opened in place" else [20])
            answers[way] = list(fork.decode(Sampling(), 6, frozenset()))
            fork.close()
            told = generation.cache.read_from_store
            generation.close()
        assert [(one.before, one.tokens, one.way) for one in told.passes] == [
            (FOUND, TOKENS - FOUND, way),
            (TOKENS, 20, way),
        ]
    assert answers["opened in place"] != answers["streamed"]


def test_what_a_token_takes_is_learned_and_kept(place, model, cold_dir):
    with attached(model, cold_dir, store=place) as hill:
        for known in (False, True):
            cache = hill.new_cache()
            by_generate(model, cache, ids_of(TOKENS))
            told = cache.read_from_store
            cache.close()
            if known:
                (one,) = told.passes
                # So few bytes stream sooner from any drive: it need not be measured.
                assert (one.way, one.streamed_seconds < 0.1) == ("streamed", True)
                assert one.in_place_seconds > 0
                assert "even of a drive of" in one.reason
                assert KeptWindows.of_user().drive(place) is None
    table = KeptWindows.of_user().table(key_of(place, model))
    assert table.window(1, TOKENS) > 0
    # Of other machines, drives and models nothing is known.
    assert table.window(1, 4096) is None


def test_nobody_knows_what_no_token_was_timed_for(place, model, cold_dir):
    ids = ids_of(TOKENS)
    with attached(model, cold_dir, store=place) as hill, torch.no_grad():
        for found in (0, FOUND):
            cache = hill.new_cache()
            model(ids, past_key_values=cache, logits_to_keep=1)
            told = cache.read_from_store
            cache.close()
            assert told.found_tokens == found
    (one,) = told.passes
    assert (one.way, one.streamed_seconds, one.in_place_seconds) == ("streamed", None, None)
    assert "no token was timed" in one.reason


def test_a_drive_is_measured_when_its_rate_decides(place, model, cold_dir):
    """Steps so fast that even so few bytes are worth asking for it; then it is kept."""
    kept = KeptWindows.of_user()
    kept.keep(key_of(place, model), SlackTable.measured(lambda new, before: 1e-4))
    # 100,000 tokens of 256 bytes and more would stream for more than a second from a slow one.
    with Store(place) as store:
        rates = KnownRates(store.files, ModelShape.from_config(model.config, model.dtype), "cpu")
        found = rates.at(100_000, 100 * MIB, 64)
        assert kept.drive(place) is not None
        assert found.step_seconds == pytest.approx(2e-4)
        assert found.read_bytes_per_second == kept.drive(place).read(4 * MIB)
        assert rates.at(100_000, 1, 64) == found


def test_a_drive_that_cannot_be_measured_costs_no_answer(place, model, tmp_path):
    KeptWindows.of_user().keep(key_of(place, model), SlackTable.measured(lambda new, before: 1e-4))
    with Store(place) as store:
        rates = KnownRates(store.files, ModelShape.from_config(model.config, model.dtype), "cpu")
        place.rename(tmp_path / "gone")
        found = rates.at(100_000, 100 * MIB, 64)
        (tmp_path / "gone").rename(place)
    assert isinstance(found, NoRates)
    assert "cannot be measured" in found.reason
