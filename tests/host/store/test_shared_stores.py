# SPDX-License-Identifier: Apache-2.0
"""What fails for one process, or for a while, takes nothing of a store from all the others."""

import itertools
import os
import signal
import sqlite3
from contextlib import closing
from functools import partial
from threading import Barrier, Thread

import numpy as np
import pytest
from few_descriptors import free_descriptors
from stored_bytes import flip

from hillinfer.drive.calls import DriveCalls
from hillinfer.secrecy.key_sources import KeyFile
from hillinfer.store.keys import ExtentShape
from hillinfer.store.maintenance import chains, pin
from hillinfer.store.pool_files import StoreError, StoreExistsError
from hillinfer.store.prefix import WrongBytesError
from hillinfer.store.store import Store
from hillinfer.store_namespaces import prefix_ids, token_ids
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put, rows_of
from hillinfer_vllm.shared_store import opened_store

MIB = 1 << 20
SPACE = namespace()
IDS = prompt(1, 3000)


@pytest.fixture
def place(tmp_path):
    """A store with one pinned prompt of three chunks."""
    Store.create(tmp_path / "store", 64 * MIB)
    with Store(tmp_path / "store") as store:
        assert put(store, SPACE, IDS) == 2944
        assert pin(store.database, chains(store.database)[0].name, 1) == 3
    return tmp_path / "store"


# --- An index that cannot be opened ---


def opened_with(place, descriptors):
    """Return why a store cannot be opened with so many more descriptors, None where it can."""
    with free_descriptors(descriptors):
        try:
            Store(place).close()
        except StoreError as error:
            return str(error)
    return None


def known(place):
    """Return what an index alone knows: whether a prompt is pinned, and how much was written."""
    with Store(place) as store:
        (chain,) = chains(store.database)
        return chain.is_pinned, store.statistics()["written_bytes"]


def test_an_index_that_cannot_be_opened_for_a_while_is_kept(place):
    before = known(place)
    assert before[0]
    said = []
    for descriptors in range(10):
        said.append(opened_with(place, descriptors))
        assert known(place) == before, said
    assert any("it stays as it is" in one for one in said if one)
    assert said[-1] is None
    assert not (place / "index.broken").exists()


def test_a_broken_index_stays_in_its_place_until_there_is_a_new_one(place):
    index = place / "index.sqlite"
    said = []
    for descriptors in range(14):
        index.write_bytes(b"no index")
        said.append(opened_with(place, descriptors))
        if said[-1]:
            assert index.read_bytes() == b"no index", said
        else:
            assert (place / "index.broken").read_bytes() == b"no index"
    assert any("cannot be made anew" in one for one in said if one)
    assert said[-1] is None
    with Store(place) as store:
        assert check(store, SPACE, IDS) == 2944


# --- A child that was forked ---


def in_child(act):
    """Return whether an action returns True in a forked child, which is killed then."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, b"right" if act() else b"wrong")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as said:
        return said.read() == b"right"


@pytest.mark.parametrize("ends", ["the child", "its parent"])
def test_a_child_that_closes_a_store_takes_nothing_from_its_parent(place, ends):
    ids, others = prompt(2, 1024), prompt(3, 1024)
    words = np.asarray(ids, np.uint32)
    store = Store(place)
    found = store.find(SPACE, IDS)
    writer = store.writer(SPACE, ids)
    for layer in range(SPACE.layers - 1):
        writer.write(layer, 0, rows_of(SPACE, words, layer, 0, 16))

    def leave():
        found.close()
        writer.close()
        store.close()
        store.close()
        return True

    if ends == "the child":
        assert in_child(leave)
    else:
        leave()
    with Store(place) as other:
        facts = other.statistics()
        assert (facts["leases"], facts["writing"]) == ((3, 1) if ends == "the child" else (0, 0))
        assert put(other, SPACE, others) == 1024
    if ends == "the child":
        writer.write(SPACE.layers - 1, 0, rows_of(SPACE, words, SPACE.layers - 1, 0, 16))
        writer.publish(1024)
        assert writer.published_tokens == 1024, store.counts.last_failure
        leave()
    with Store(place) as other:
        assert check(other, SPACE, ids) == (1024 if ends == "the child" else 0)
        assert check(other, SPACE, others) == 1024
        facts = other.statistics()
        assert (facts["leases"], facts["writing"]) == (0, 0)


def test_a_child_opens_a_store_anew(place):
    store = Store(place)

    def finds_nothing():
        return store.find(SPACE, IDS) is None and "in the child" in store.counts.last_failure

    def opens_it():
        with Store(place) as own:
            return check(own, SPACE, IDS) == 2944

    with store:
        assert in_child(finds_nothing)
        assert in_child(opens_it)
        assert check(store, SPACE, IDS) == 2944


# --- What comes behind a chunk that was damaged ---


@pytest.fixture
def damaged(place):
    """The store, with the key of its prompt, behind whose first chunk one was damaged."""
    with Store(place) as store, store.find(SPACE, IDS) as found:
        first, second, last = (chunk.record for chunk in found.chunks)
        assert token_ids(store, last.key.hex()) == prefix_ids(store, last.key) == IDS[:2944]
        assert prefix_ids(store, first.key) == IDS[:1024]
        assert pin(store.database, last.key.hex(), 1) == 3
    for header in (0, 4096):
        flip(place / "pool-0.kv", second.span.offset + header + 100)
    for _ in range(2):
        with Store(place) as store:
            assert check(store, SPACE, IDS) == 1024
    return place, last.key


@pytest.mark.parametrize("number", ["forgotten", "nobody's", "another's"])
def test_what_a_damaged_chunk_leaves_is_named_and_removed(damaged, number):
    """Older stores left the number of what came before, which another chunk may have now."""
    place, key = damaged
    name = key.hex()
    with Store(place) as store:
        put(store, SPACE, prompt(2, 1024))
    with closing(sqlite3.connect(place / "index.sqlite")) as index, index:
        query = "SELECT count(*) FROM chunk WHERE parent NOT IN (SELECT id FROM chunk)"
        assert index.execute(query).fetchall() == [(0,)]
        query = "SELECT max(id), max(id) + 9 FROM chunk"
        ((other, none),) = index.execute(query)
        if number != "forgotten":
            parent = none if number == "nobody's" else other
            index.execute("UPDATE chunk SET parent = ? WHERE key = ?", (parent, key))
    with Store(place) as store:
        assert [pin(store.database, name, how) for how in (0, 1)] == [1, 1]
        for ids, called in ((token_ids, name), (prefix_ids, key)):
            with pytest.raises(StoreError, match=r"begins with was damaged.*hillinfer store rm"):
                ids(store, called)
        assert store.remove(name) == 1
        assert check(store, SPACE, IDS) == check(store, SPACE, prompt(2, 1024)) == 1024
        assert store.statistics()["chunks"] == 2
        put(store, SPACE, IDS)
        assert check(store, SPACE, IDS) == 2944
        assert token_ids(store, name) == IDS[:2944]


def test_what_a_damaged_chunk_leaves_is_found_again_behind_a_new_one(damaged):
    place, key = damaged
    with Store(place) as store:
        put(store, SPACE, IDS, tokens=2048)
        assert check(store, SPACE, IDS) == 2944
        assert token_ids(store, key.hex()) == IDS[:2944]
        assert store.remove(key.hex()) == 3


@pytest.mark.parametrize("is_stored_again", [False, True])
def test_what_a_damaged_chunk_leaves_goes_first_until_it_is_found_again(tmp_path, is_stored_again):
    """It was looked up with the damaged chunk, later than all else was used."""
    place, space, ids = tmp_path / "small", namespace(row_bytes=2048), prompt(1, 3072)
    moments = itertools.count(10**9)
    opened = partial(Store, place, eviction="lru", clock=lambda: float(next(moments)))
    Store.create(place, 64 * MIB)
    with opened() as store:
        put(store, space, ids)
        with store.find(space, ids) as found:
            _, second, last = (chunk.record for chunk in found.chunks)
        for seed in (2, 3, 4):
            put(store, space, prompt(seed, 1024))
    flip(place / "pool-0.kv", second.span.offset + ExtentShape.of(space).rows_at(1, 3))
    with opened() as store, pytest.raises(WrongBytesError):
        check(store, space, ids)
    with opened() as store:
        if is_stored_again:
            put(store, space, ids, tokens=2048)
        for seed in itertools.count(5):
            put(store, space, prompt(seed, 1024))
            if store.counts.evicted_chunks:
                break
        assert store.counts.evicted_chunks == 1
        is_left = any(last.key.hex().startswith(one.name) for one in chains(store.database))
        assert is_left == is_stored_again
        assert check(store, space, ids) == (3072 if is_stored_again else 1024)


# --- Chunks that two processes store, or take away, at once ---


def filled(store, writer, ids, begin, stop):
    """Let a writer store groups of a prompt as far as it may, 512 tokens a pass."""
    words = np.asarray(ids, np.uint32)
    while begin < stop and not writer.is_ended:
        end = min(begin // 512 * 512 + 512, stop)
        for layer in range(SPACE.layers):
            writer.write(layer, begin // 64, rows_of(SPACE, words, layer, begin // 64, end // 64))
        writer.publish(end)
        begin = end
    writer.close()


def emptied(store):
    """Remove all that is listed; return how many chunks are left."""
    while listed := chains(store.database):
        store.remove(listed[0].name)
    return store.statistics()["chunks"]


@pytest.mark.parametrize("is_stored_first", [True, False])
def test_no_chunk_is_extended_to_what_another_process_has_stored(tmp_path, is_stored_first):
    """A conversation goes on in its last chunk, while another process stores the same prompt."""
    Store.create(tmp_path / "one", 64 * MIB)
    ids = prompt(4, 2432)
    with Store(tmp_path / "one") as own, Store(tmp_path / "one") as other:
        beside = other.find(SPACE, ids)
        put(own, SPACE, ids, tokens=320)
        with own.find(SPACE, ids) as found:
            writers = own.writer(SPACE, ids, found), other.writer(SPACE, ids, beside)
            if is_stored_first:
                filled(other, writers[1], ids, 0, 2432)
            filled(own, writers[0], ids, 320, 2432)
            writers[1].close()
        facts = own.statistics()
        # Its first turn stays beside the other's chunks, or goes on as the prompt's.
        assert facts["tokens"] == 2432 + (320 if is_stored_first else 0)
        assert own.counts.failures == other.counts.failures == 0
        assert check(own, SPACE, ids) == check(other, SPACE, ids) == 2432
        assert emptied(own) == 0


class Beside(DriveCalls):
    """Does something before the next write to a drive."""

    act = None

    def pwrite(self, *given):
        act, self.act = self.act, None
        if act is not None:
            act()
        return super().pwrite(*given)


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_chunk_that_is_going_follows_no_new_one(damaged, is_beside):
    """What a damaged chunk left is removed, while another process stores that chunk again."""
    place, key = damaged
    calls = Beside()
    with Store(place, calls=calls) as own, Store(place) as other:

        def stores():
            assert put(other, SPACE, IDS, tokens=2048) == 2048

        if is_beside:
            calls.act = stores
        assert own.remove(key.hex()) == 1
        assert calls.act is None
        if not is_beside:
            stores()
        assert [one.tokens for one in chains(own.database)] == [2048]
        assert check(own, SPACE, IDS) == 2048
        assert emptied(own) == 0


# --- A drive that is not there ---


@pytest.mark.parametrize("lost", ["a drive", "a drive and the index"])
def test_no_file_is_made_where_a_drive_is_not_mounted(tmp_path, lost):
    place, drive, away = (tmp_path / name for name in ("store", "drive", "away"))
    ids = prompt(5, 4096)
    Store.create(place, 64 * MIB, [drive])
    with Store(place) as store:
        assert put(store, SPACE, ids) == 4096
    # Of a drive that is not mounted the mount point is left.
    drive.rename(away)
    drive.mkdir()
    if lost != "a drive":
        (place / "index.sqlite").unlink()
    with pytest.raises(StoreError, match=r"pool-1\.kv cannot be used: .*; put the drive back"):
        Store(place)
    assert list(drive.iterdir()) == []
    drive.rmdir()
    away.rename(drive)
    with Store(place) as store:
        assert check(store, SPACE, ids) == 4096


@pytest.mark.parametrize("there", [[], ["store/pool-0.kv"], ["drive/pool-1.kv"]])
def test_a_store_that_never_held_anything_gets_its_files(tmp_path, there):
    """Whoever opened it first may have been killed with some of them made."""
    Store.create(tmp_path / "store", 64 * MIB, [tmp_path / "drive"])
    for file in there:
        (tmp_path / file).write_bytes(b"")
    with Store(tmp_path / "store") as store:
        assert put(store, SPACE, IDS) == 2944
    with Store(tmp_path / "store") as store:
        assert check(store, SPACE, IDS) == 2944


# --- Several that make a store at once ---


class Meeting(KeyFile):
    """A key that is made while another thread begins to make a store."""

    def meet(self, other):
        object.__setattr__(self, "other", other)
        return self

    def make(self, calls):
        self.other.start()
        # With nothing in its way it is done by then; what it waits for comes behind this.
        self.other.join(0.5)
        super().make(calls)


@pytest.mark.parametrize(("where", "said"), [("store", "there"), ("elsewhere", "made")])
def test_of_two_that_make_a_store_at_once_one_does(tmp_path, where, said):
    """Else keys, store and files would be of two stores. The twin makes one elsewhere."""
    place, key, told = tmp_path / "store", KeyFile(tmp_path / "key"), []

    def second():
        try:
            Store.create(tmp_path / where, 64 * MIB, key=KeyFile(tmp_path / "other key"))
        except StoreExistsError:
            told.append("there")
        else:
            told.append("made")

    other = Thread(target=second)
    Store.create(place, 64 * MIB, key=Meeting(key.path).meet(other))
    other.join()
    assert told == [said]
    with Store(place, key=key) as store:
        assert put(store, SPACE, IDS) == 2944
        assert check(store, SPACE, IDS) == 2944


def test_ranks_that_begin_together_get_one_store(tmp_path):
    place, begin, opened = tmp_path / "some" / "store", Barrier(4), []

    def rank():
        begin.wait()
        opened.append(opened_store({"store": str(place), "store_size": "64MiB"}))

    ranks = [Thread(target=rank) for _ in range(4)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert len(opened) == 4
    # What one stores all others find.
    assert put(opened[0], SPACE, IDS) == 2944
    for store in opened:
        assert check(store, SPACE, IDS) == 2944
        store.close()
