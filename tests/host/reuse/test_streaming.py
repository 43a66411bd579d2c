# SPDX-License-Identifier: Apache-2.0
"""A stored prefix streams into a cache while a pass goes through it: always the same answers."""

import copy
import errno
import gc
import os
import pickle
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from generation_runs import attached
from interrupts import interrupted
from tiny_models import FAMILIES, TinyModel, prompts
from transformers import DynamicCache
from waiting import until

from hillinfer.drive.calls import DriveCalls
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.reuse.landed_states import LandedStates, OfferedRows
from hillinfer.reuse.row_placing import PlacingRules
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.keys import CHUNK_TOKENS, Reuse
from hillinfer.store.store import Store
from hillinfer.trace.recorder import Lane, Silent

MIB = 1 << 20
# As the prompt was read, so that rows that are computed anew have the same bits.
CHUNK = 256
LAYERS, HEAD_DIM = 5, 16
TOKENS = 2350
STORED = 2304
ENOUGH = 30


def ids_of(tokens):
    ids, _ = prompts([tokens])
    return ids[0].tolist()


def model_of(family="llama", **given):
    heads = {"heads": "mha"} if family == "opt" else {}
    return TinyModel(
        family, head_dim=HEAD_DIM, dtype=torch.bfloat16, layers=LAYERS, **heads, **given
    ).build()


class Drive(DriveCalls):
    """Reads of rows can be held up, counted, and fail from one of them on."""

    def __init__(self):
        self.reads, self.fails_at, self.gate = 0, None, threading.Event()
        self.gate.set()
        self._counting = threading.Lock()

    def read_many(self, way, reads, address):
        if reads.byte_counts.max() < 64 * 1024:
            # A sheet of a chunk.
            return super().read_many(way, reads, address)
        assert self.gate.wait(ENOUGH)
        with self._counting:
            self.reads += 1
            fails = self.fails_at is not None and self.reads >= self.fails_at
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_many(way, reads, address)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A stored prompt, what it answers, and the cache that it was stored from."""
    place = tmp_path_factory.mktemp("streaming") / "store"
    Store.create(place, 64 * MIB)
    model, ids = model_of(), ids_of(TOKENS)
    full = DynamicCache()
    generation = Generation(model, full, CHUNK)
    generation.read(ids)
    held = [(one.keys[:, :, :STORED], one.values[:, :, :STORED]) for one in full.layers]
    answer = list(generation.decode(Sampling(), 8, frozenset()))
    with Store(place) as store:
        assert made_prompts(store, model).keep(_cut(held), ids[:STORED]) == STORED
    return place, model, ids, held, answer


def made_prompts(store, model, **given):
    return StoredPrompts(store, model, reuse=Reuse.EXACT, chunk_tokens=CHUNK, **given)


def _cut(held):
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(held):
        cache.update(keys, values, layer)
    return cache


@pytest.fixture
def drive():
    return Drive()


@pytest.fixture(autouse=True, params=[0, 2], ids=["placed as read", "placed by the pass"])
def pass_threads(request):
    """How many threads of a pass put rows to their places; 0 where those that read do."""
    return request.param


@pytest.fixture
def prompts_of(pass_threads):
    """Return what opens a store's prompts, whose rows such a pass places."""

    def opened(store, model, patience_seconds=PlacingRules.patience_seconds, **given):
        rules = PlacingRules(pass_threads, patience_seconds)
        return made_prompts(store, model, placing=rules, **given)

    return opened


@pytest.fixture
def place(known, tmp_path):
    """A copy of the store, to be damaged."""
    import shutil

    return shutil.copytree(known[0], tmp_path / "store")


def rest(model, cache, ids, tokens):
    generation = Generation(model, cache, CHUNK)
    generation.read(ids[tokens:])
    return list(generation.decode(Sampling(), 8, frozenset()))


def same_rows(cache, held):
    return all(
        torch.equal(one.keys[:, :, :STORED], keys)
        and torch.equal(one.values[:, :, :STORED], values)
        for one, (keys, values) in zip(cache.layers, held, strict=True)
    )


def test_layers_compute_while_later_ones_are_read(known, drive, prompts_of):
    place, model, ids, held, _ = known
    drive.gate.clear()
    seen = []
    with Store(place, calls=drive) as store:
        stored = prompts_of(store, model)
        cache = DynamicCache()
        assert stored.load_into(cache, ids) == STORED
        assert cache.get_seq_length() == STORED
        hooks = [
            layer.register_forward_hook(lambda *_, at=at: seen.append((at, drive.reads)))
            for at, layer in enumerate(model.model.layers)
        ]
        thread = threading.Thread(target=rest, args=(model, cache, ids, STORED))
        thread.start()
        time.sleep(0.05)
        assert seen == []
        drive.gate.set()
        thread.join(ENOUGH)
        for hook in hooks:
            hook.remove()
    assert [at for at, _ in seen[:LAYERS]] == list(range(LAYERS))
    assert same_rows(cache, held)
    cache.layers[2].keys[0, 0, 7, 3] += 1
    assert not same_rows(cache, held)


class Neighbours(DriveCalls):
    """Notes what one call may read, and how many reads of rows follow another one in the file."""

    def __init__(self):
        self.seen = []

    def read_many(self, way, reads, address):
        if reads.byte_counts.max() >= 64 * 1024:
            starts, ends = reads.file_offsets[1:], (reads.file_offsets + reads.byte_counts)[:-1]
            self.seen.append((way.joined_bytes, int((starts == ends).sum())))
        return super().read_many(way, reads, address)


def test_layers_that_wait_for_a_pass_come_in_long_calls(known, pass_threads, prompts_of):
    place, model, ids, held, _ = known
    calls = Neighbours()
    with Store(place, calls=calls) as store:
        cache = DynamicCache()
        prompts_of(store, model).load_into(cache, ids)
        rest(model, cache, ids, STORED)
        assert same_rows(cache, held)
    if pass_threads:
        # One layer, then three times as many: two of them follow another one in each full chunk.
        assert sorted(calls.seen) == [(0, 0), (4 << 20, 0), (4 << 20, 2 * (STORED // CHUNK_TOKENS))]
    else:
        assert {joined for joined, _ in calls.seen} == {0}


class FirstLayer(Drive):
    """Gives the rows of the first layer, and the others once the gate is open.

    Threads read side by side, so it knows the first layer by where it lies, and not by who comes
    first.
    """

    def __init__(self, begin=None):
        super().__init__()
        self.begin, self.begins, self.done = begin, [], 0

    def read_many(self, way, reads, address):
        is_rows = bool(reads.byte_counts.max() >= 64 * 1024)
        begin = int(reads.file_offsets.min())
        if is_rows and self.begin is not None and begin > self.begin:
            assert self.gate.wait(ENOUGH)
        read = DriveCalls.read_many(self, way, reads, address)
        with self._counting:
            self.done += is_rows
            self.begins += [begin] * is_rows
        return read


@pytest.mark.parametrize("breaks", [False, True])
def test_rows_wait_for_a_pass_that_keeps_all_cores_busy(
    known, pass_threads, breaks, monkeypatch, prompts_of
):
    place, model, ids, held, _ = known
    every = FirstLayer()
    with Store(place, calls=every) as store:
        cache = DynamicCache()
        prompts_of(store, model).load_into(cache, ids)
        rest(model, cache, ids, STORED)
    drive = FirstLayer(min(every.begins))
    computes, as_read, offered = threading.Event(), [], []
    put, offer = LandedStates.place, LandedStates.offer

    def noted(of, method):
        def call(*given):
            of.append(computes.is_set())
            return method(*given)

        return call

    monkeypatch.setattr(LandedStates, "place", noted(as_read, put))
    monkeypatch.setattr(LandedStates, "offer", noted(offered, offer))
    with Store(place, calls=drive) as store:
        stored = prompts_of(store, model)
        cache = DynamicCache()

        def computing(*_):
            if computes.is_set():
                return
            computes.set()
            # From here on a pass computes that has come for one layer.
            drive.gate.set()
            until(lambda: drive.done > 1)
            until(lambda: any(offered if pass_threads else as_read))
            # Who reads places nothing while a pass computes that keeps all cores busy.
            assert any(as_read) is (pass_threads == 0)
            if breaks:
                raise KeyError

        hook = model.model.layers[0].mlp.register_forward_hook(computing)
        drive.gate.clear()
        stored.load_into(cache, ids)
        try:
            with pytest.raises(KeyError) if breaks else nullcontext():
                rest(model, cache, ids, STORED)
        finally:
            hook.remove()
        if breaks:
            # Whoever broke it off comes for no more.
            until(lambda: not landing_threads())
            assert stored.loaded.placing_seconds == 0
        assert bool(offered) is (pass_threads > 0)
        assert same_rows(cache, held)


@pytest.mark.parametrize("pass_threads", [2], indirect=True)
def test_a_pass_that_is_interrupted_while_it_places_rows_loses_none(known, monkeypatch, prompts_of):
    """It is no failure of a drive: whoever read them places them, and nothing is computed anew."""
    place, model, ids, held, _ = known
    every = FirstLayer()
    with Store(place, calls=every) as store:
        cache = DynamicCache()
        prompts_of(store, model).load_into(cache, ids)
        rest(model, cache, ids, STORED)
    drive = FirstLayer(min(every.begins))
    # No core is idle, and rows wait for the pass however late it comes.
    monkeypatch.setattr(OfferedRows, "is_placed", lambda *_: time.sleep(0.01))
    with Store(place, calls=drive) as store:
        stored = prompts_of(store, model, ENOUGH)
        cache = DynamicCache()
        # Other layers are read once the pass computes.
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: drive.gate.set())
        drive.gate.clear()
        stored.load_into(cache, ids)
        try:
            with pytest.raises(KeyboardInterrupt), interrupted(OfferedRows.place):
                rest(model, cache, ids, STORED)
        finally:
            hook.remove()
            drive.gate.set()
        assert same_rows(cache, held)
        assert stored.loaded.recomputed_tokens == store.counts.failures == 0


@pytest.fixture
def _no_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
def test_memory_of_a_dropped_cache_is_used_again_at_once(known, prompts_of):
    place, model, ids, *_ = known
    with Store(place) as store:
        stored = prompts_of(store, model)

        def used():
            """Where the keys of a cache lie that is dropped when a pass went through it."""
            cache = DynamicCache()
            stored.load_into(cache, ids)
            rest(model, cache, ids, STORED)
            # The thread that read has it too, for as long as it takes to end.
            until(lambda: not landing_threads())
            return cache.layers[0].keys.data_ptr()

        assert len({used() for _ in range(4)}) == 1
        # The twin: what somebody keeps is nobody else's.
        kept = []
        for _ in range(2):
            kept.append(DynamicCache())
            stored.load_into(kept[-1], ids)
        assert kept[0].layers[0].keys.data_ptr() != kept[1].layers[0].keys.data_ptr()


def landing_threads():
    return [one for one in threading.enumerate() if one.name == "hillinfer-store-land"]


def test_answers_are_those_of_a_cache_that_was_full_before(known, prompts_of):
    place, model, ids, held, _ = known
    with Store(place) as store:
        stored = prompts_of(store, model)
        expected = rest(model, _cut(held), ids, STORED)
        for cache in (DynamicCache(), DynamicCache(config=model.config)):
            assert stored.load_into(cache, ids, new_tokens=0) == STORED
            assert rest(model, cache, ids, STORED) == expected
            assert same_rows(cache, held)
            assert cache.get_seq_length() == TOKENS + 7
        changed = DynamicCache()
        stored.load_into(changed, ids)
        changed.layers[0].values[0, 0, :] *= -2
        assert rest(model, changed, ids, STORED) != expected
        assert stored.loaded.recomputed_tokens == 0


# Layers come in three calls where a pass places them, and in one for each chunk where not.
@pytest.mark.parametrize(
    ("pass_threads", "first"),
    [(0, 1), (0, 4), (2, 1), (2, 2), (2, 3), (2, 4)],
    indirect=["pass_threads"],
)
def test_a_drive_that_fails_in_the_middle_costs_time_and_no_answer(known, drive, first, prompts_of):
    place, model, ids, held, answer = known
    drive.fails_at = first
    with Store(place, calls=drive) as store:
        stored = prompts_of(store, model)
        cache = DynamicCache()
        assert stored.load_into(cache, ids) == STORED
        assert rest(model, cache, ids, STORED) == answer
        failed = drive.reads >= first
        assert stored.loaded.recomputed_tokens == (STORED if failed else 0)
        assert (store.counts.failures > 0) is failed
        assert same_rows(cache, held)
        assert cache.get_seq_length() == TOKENS + 7


def rows_at(store, ids, model, chunk, layer):
    stored = made_prompts(store, model)
    with store.find(stored.namespace, ids) as found:
        own = found.chunks[chunk]
        return own.record.span.offset + own.shape.rows_at(layer, 2) + 100


def flip(place, offset):
    with (place / "pool-0.kv").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


# Whoever places rows of the first layer is the same: no pass computes yet.
@pytest.mark.parametrize(
    ("pass_threads", "chunk", "layer"),
    [(0, 0, 0), (0, 2, 2), (2, 1, 1), (2, 0, 3), (2, 2, LAYERS - 1)],
    indirect=["pass_threads"],
)
def test_a_flipped_bit_is_computed_anew_behind_what_is_right(
    known, place, chunk, layer, prompts_of
):
    _, model, ids, held, answer = known
    with Store(place) as store:
        offset = rows_at(store, ids, model, chunk, layer)
    flip(place, offset)
    with Store(place) as store:
        stored = prompts_of(store, model)
        cache = DynamicCache()
        assert stored.load_into(cache, ids) == STORED
        assert rest(model, cache, ids, STORED) == answer
        assert stored.loaded.recomputed_tokens == STORED - chunk * CHUNK_TOKENS
        assert store.counts.quarantined_chunks == 1
        assert same_rows(cache, held)
        start = chunk * CHUNK_TOKENS
        # Next time less is found, and it comes.
        again = DynamicCache()
        assert stored.load_into(again, ids) == start
        if start:
            assert rest(model, again, ids, start) == answer


def test_two_damaged_chunks_are_met_one_after_the_other(known, place, prompts_of):
    _, model, ids, _, answer = known
    with Store(place) as store:
        offsets = [rows_at(store, ids, model, 2, 0), rows_at(store, ids, model, 1, 4)]
    for offset in offsets:
        flip(place, offset)
    with Store(place) as store:
        stored = prompts_of(store, model)
        cache = DynamicCache()
        assert stored.load_into(cache, ids) == STORED
        assert rest(model, cache, ids, STORED) == answer
        assert stored.loaded.recomputed_tokens == STORED - CHUNK_TOKENS


def test_strictness_makes_a_miss_an_error(known, place, prompts_of):
    _, model, ids, _, _ = known
    with Store(place) as store:
        offset = rows_at(store, ids, model, 1, 3)
    flip(place, offset)

    def refuse(error):
        raise RuntimeError("strict") from error

    with Store(place, raising=refuse) as store:
        cache = DynamicCache()
        prompts_of(store, model).load_into(cache, ids)
        with pytest.raises(RuntimeError, match="strict"):
            rest(model, cache, ids, STORED)


@pytest.mark.parametrize(
    ("pass_threads", "family"),
    [(2 * (at % 2), family) for at, family in enumerate(FAMILIES)],
    indirect=["pass_threads"],
)
def test_generate_takes_a_cache_that_is_still_coming(tmp_path, family, prompts_of):
    Store.create(tmp_path / "store", 64 * MIB)
    model, ids = model_of(family), ids_of(400)
    full = DynamicCache()
    Generation(model, full, CHUNK).read(ids)
    inputs = torch.tensor([ids])
    with Store(tmp_path / "store") as store:
        stored = prompts_of(store, model)
        stored.keep(full, ids)
        said = {}
        for beams in (1, 2):
            found = DynamicCache()
            assert stored.load_into(found, ids) == 256
            eager = DynamicCache()
            for layer, one in enumerate(full.layers):
                eager.update(one.keys[:, :, :256], one.values[:, :, :256], layer)
            for cache in (found, eager) if beams > 1 else ():
                # `generate` leaves that to whoever gives a cache that holds tokens.
                cache.batch_repeat_interleave(beams)
            said[beams] = [
                model.generate(
                    inputs,
                    past_key_values=cache,
                    max_new_tokens=6,
                    num_beams=beams,
                    do_sample=False,
                ).tolist()
                for cache in (found, eager)
            ]
            assert said[beams][0] == said[beams][1]


def test_what_is_collected_of_a_pass_is_its_own(known, place, prompts_of):
    """Rows are computed anew in the middle of a pass that collects what its layers put out."""
    _, model, ids, held, _ = known
    with Store(place) as store:
        offset = rows_at(store, ids, model, 1, 3)
    flip(place, offset)
    last = torch.tensor([ids[STORED:]])
    with Store(place) as store, torch.no_grad():
        cache = DynamicCache()
        prompts_of(store, model).load_into(cache, ids)
        found = model(last, past_key_values=cache, output_hidden_states=True).hidden_states
        expected = model(last, past_key_values=_cut(held), output_hidden_states=True).hidden_states
    assert [one.shape for one in found] == [one.shape for one in expected]


def test_a_pass_that_collects_what_layers_put_out_changes_no_name(known, prompts_of):
    place, _, ids, _, _ = known
    model = model_of()
    with Store(place) as store, torch.no_grad():
        before = prompts_of(store, model).namespace
        model(torch.tensor([ids[:8]]), output_hidden_states=True)
        assert prompts_of(store, model).namespace == before
        # A hook of somebody else may change what it sees.
        model.model.layers[1].register_forward_hook(lambda *_: None)
        assert prompts_of(store, model).namespace != before


def test_copies_are_whole_and_their_own(known, prompts_of):
    place, model, ids, held, _ = known
    with Store(place) as store:
        stored = prompts_of(store, model)
        expected = rest(model, _cut(held), ids, STORED)
        cache = DynamicCache()
        stored.load_into(cache, ids)
        twins = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), copy.copy(cache.layers[0])
        assert twins[2].keys.shape == cache.layers[0].keys.shape
        for own in (twins[0], cache, twins[1]):
            assert rest(model, own, ids, STORED) == expected
            assert same_rows(own, held)


def test_a_cache_is_cut_reset_and_made_larger(known, prompts_of):
    place, model, ids, held, _ = known
    with Store(place) as store:
        stored = prompts_of(store, model)
        cache = DynamicCache()
        stored.load_into(cache, ids)
        cache.crop(-40)
        assert cache.get_seq_length() == STORED - 40
        assert rest(model, cache, ids, STORED - 40) == rest(
            model, _cut([(k[:, :, :-40], v[:, :, :-40]) for k, v in held]), ids, STORED - 40
        )
        cache = DynamicCache()
        stored.load_into(cache, ids)
        cache.batch_repeat_interleave(3)
        assert cache.layers[1].keys.shape[0] == 3
        cache.reset()
        assert cache.get_seq_length() == 0
        # Without room from the beginning it is made while an answer grows.
        stored.load_into(small := DynamicCache(), ids[: STORED + 1], new_tokens=0)
        generation = Generation(model, small, CHUNK)
        generation.read(ids[STORED : STORED + 1])
        assert len(list(generation.decode(Sampling(), 5, frozenset()))) == 5
        assert same_rows(small, held)


# No pass computes when it is closed, so whoever places rows is the same.
@pytest.mark.parametrize("pass_threads", [2], indirect=True)
def test_a_store_that_is_closed_meanwhile_costs_no_answer(known, drive, prompts_of):
    place, model, ids, _, answer = known
    drive.gate.clear()
    store = Store(place, calls=drive)
    stored = prompts_of(store, model)
    cache = DynamicCache()
    stored.load_into(cache, ids)
    closing = threading.Thread(target=store.close)
    closing.start()
    time.sleep(0.02)
    drive.gate.set()
    closing.join(ENOUGH)
    assert not closing.is_alive()
    assert rest(model, cache, ids, STORED) == answer


def test_a_cache_that_is_dropped_stops_reading_and_gives_its_lease_back(known, drive, prompts_of):
    place, model, ids, _, _ = known
    drive.gate.clear()
    with Store(place, calls=drive) as store:
        stored = prompts_of(store, model)
        cache = DynamicCache()
        stored.load_into(cache, ids)
        del cache
        gc.collect()
        drive.gate.set()
        until(lambda: not landing_threads())
        assert store.database.rows("SELECT * FROM lease") == []


def test_waiting_for_rows_is_told(known, drive, prompts_of):
    place, model, ids, _, _ = known
    drive.gate.clear()

    class Noted(Silent):
        spans = ()

        def note(self, lane, name, start, stop, **details):
            self.spans = (*self.spans, (lane, name, details["layer"], stop - start))

    noted = Noted()
    with Store(place, calls=drive) as store:
        stored = prompts_of(store, model, recorder=noted)
        cache = DynamicCache()
        stored.load_into(cache, ids)
        opener = threading.Timer(0.5, drive.gate.set)

        def comes(*_):
            # It waits long before the gate opens, however busy the machine is.
            if opener.ident is None:
                opener.start()

        hook = model.model.layers[0].register_forward_pre_hook(comes)
        rest(model, cache, ids, STORED)
        hook.remove()
        counts = stored.loaded
        told = store.metrics()["hillinfer_store_bubble_seconds"]
    assert told == pytest.approx(counts.bubble_seconds)
    assert noted.spans[0][:3] == (Lane.BUBBLES, "rows", 0)
    assert noted.spans[0][3] > 50e6
    assert counts.bubble_seconds > 0.05
    assert (counts.prefixes, counts.tokens) == (1, STORED)
    assert counts.read_bytes == STORED * LAYERS * 2 * 2 * HEAD_DIM * 2


# The harder of both: what is wrong is known only when the pass places it.
@pytest.mark.parametrize("pass_threads", [2], indirect=True)
def test_an_attached_model_computes_what_does_not_come(known, place, cold_dir, prompts_of):
    _, _, ids, held, _ = known
    model = model_of()
    with Store(place) as store:
        offset = rows_at(store, ids, model, 1, 2)
    flip(place, offset)
    with Store(place) as store:
        # An attached model attends by other means, which exact reuse tells apart.
        stored = prompts_of(store, model)
        with attached(model, cold_dir, alpha=0.2):
            cache = DynamicCache()
            assert stored.load_into(cache, ids) == STORED
            expected = rest(model, _cut(held), ids, STORED)
            assert rest(model, cache, ids, STORED) == expected
        assert stored.loaded.recomputed_tokens == STORED - CHUNK_TOKENS
