# SPDX-License-Identifier: Apache-2.0
"""Room that a writer makes in a full store is that writer's until it is taken or given up."""

import errno
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest

from hillinfer.drive.calls import DriveCalls
from hillinfer.store.database import State
from hillinfer.store.keys import CHUNK_GROUPS, CHUNK_TOKENS, UNIT_BYTES
from hillinfer.store.store import Store
from hillinfer_bench.storing.damage import CountedCalls
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put, rows_of
from hillinfer_model.kernel_spec import GROUP_TOKENS

MIB = 1 << 20
SPACE = namespace()
TOKENS, WHOLE = 1500, 1472
# Chunks that stay, so that writers have few others to evict.
HELD = 52


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A store with the chunks that stay."""
    place = tmp_path_factory.mktemp("held") / "store"
    Store.create(place, 64 * MIB)
    with Store(place, eviction="lru") as store:
        assert put(store, SPACE, prompt(1, HELD * 1024)) == HELD * 1024
    return place


@pytest.fixture(scope="module")
def filled(held, tmp_path_factory):
    """The same store, full, while those chunks are leased by a reader."""
    place = tmp_path_factory.mktemp("filled") / "store"
    shutil.copytree(held, place)
    with Store(place, eviction="lru") as store, store.find(SPACE, prompt(1, HELD * 1024)):
        for seed in range(2, 12):
            put(store, SPACE, prompt(seed, TOKENS))
        assert store.counts.evicted_chunks > 0
    return place


@pytest.fixture
def full(filled, tmp_path):
    """A full store most of which is leased by a reader; what may give way is six chunks or so."""
    place = tmp_path / "store"
    shutil.copytree(filled, place)
    with Store(place, eviction="lru") as store:
        reader = store.find(SPACE, prompt(1, HELD * 1024))
        assert reader.tokens == HELD * 1024
        with reader:
            yield place


class LaterCalls(CountedCalls):
    """Does something at a call whose number counts from a moment on."""

    def __init__(self, act):
        super().__init__(0, act)

    def act_at(self, number):
        """Let it be at a call so many from here."""
        self.number = self.made + number


def unowned(store):
    """Make room that is being made everybody's, as if nobody had a right to it."""
    with store.database.transaction() as db:
        db.execute(f"UPDATE chunk SET owner = NULL WHERE state = {State.TOMBED:d}")


def interleaved(place, before):
    """Let another store take a prompt at every call of a writer, one after the other.

    Returns the prompts that were not kept whole, or not found afterwards, and the calls.
    """
    number, missing = 0, []
    while True:
        number += 1
        with ExitStack() as opened:
            other = opened.enter_context(Store(place, eviction="lru"))
            seeds = 1000 + 2 * number, 1001 + 2 * number
            kept = {}

            def act(name, other=other, seed=seeds[1], kept=kept):
                before(other)
                kept[seed] = put(other, SPACE, prompt(seed, TOKENS), step=1024)

            calls = LaterCalls(act)
            own = opened.enter_context(Store(place, eviction="lru", calls=calls))
            calls.act_at(number)
            kept[seeds[0]] = put(own, SPACE, prompt(seeds[0], TOKENS), step=1024)
            if calls.made < calls.number:
                return missing, number - 1
            # Whose sheets nobody has in memory.
            fresh = opened.enter_context(Store(place, eviction="lru"))
            for seed, tokens in kept.items():
                if (tokens, check(fresh, SPACE, prompt(seed, TOKENS))) != (WHOLE, WHOLE):
                    missing.append((number, seed, tokens))
            assert fresh.statistics()["free_bytes"] < 4 * MIB
            taken = sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())
            assert taken <= 64 * MIB


def test_another_writer_at_any_call_takes_no_room_that_was_made(full):
    missing, calls = interleaved(full, before=lambda store: None)
    assert calls > 10
    assert not missing
    with Store(full) as store:
        # Who read it before all that has it still.
        assert check(store, SPACE, prompt(1, HELD * 1024)) == HELD * 1024


def test_room_that_is_nobodys_is_taken_by_another_writer(full):
    missing, _ = interleaved(full, before=unowned)
    assert missing


WRITER = """
import sys
sys.path[:0] = sys.argv[2].split(":")
from hillinfer_bench.storing.made_prompts import namespace, prompt, put
from hillinfer.store.store import Store
with Store(sys.argv[1], eviction="lru") as store:
    input()
    for number in range(30):
        seed = int(sys.argv[3]) + 2 * number
        print(put(store, namespace(), prompt(seed, 1500), step=1024))
    print(store.counts.last_failure or "no failure", store.counts.evicted_chunks > 25)
"""


def test_two_processes_keep_every_prompt_whole_in_a_full_store(full, warm_python):
    running = [
        subprocess.Popen(
            [*warm_python, "-c", WRITER, str(full), ":".join(sys.path), str(2000 + own)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for own in range(2)
    ]
    for one in running:
        one.stdin.write("go\n")
        one.stdin.flush()
    told = [one.communicate()[0].splitlines() for one in running]
    assert told == [[str(WHOLE)] * 30 + ["no failure True"]] * 2
    with Store(full) as store:
        facts = store.statistics()
        assert facts["writing"] == 0
        assert facts["chunk_bytes"] + facts["free_bytes"] == store.files[0].units * UNIT_BYTES


def test_room_of_a_process_that_died_while_making_it_is_everybodys(full):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        # Dies with a chunk that nobody finds any more and whose header is still on the drive.
        calls = LaterCalls(lambda name: os._exit(0))
        with Store(full, eviction="lru", calls=calls) as store:
            calls.act_at(1)
            put(store, SPACE, prompt(3000, TOKENS))
        os.write(writing, b"lived")
        os._exit(1)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as said:
        assert said.read() == b""
    with Store(full, eviction="lru") as store:
        assert put(store, SPACE, prompt(3001, TOKENS)) == WHOLE
        store.room.collect()
        facts = store.statistics()
        assert facts["chunk_bytes"] + facts["free_bytes"] == store.files[0].units * UNIT_BYTES


def begun(store):
    """Begin a chunk that nobody fills."""
    return store.room.begin(SPACE, 0, None, b"", b"t" * 32)


def test_room_of_a_process_that_died_while_it_closed_its_store_is_everybodys(full):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        calls = LaterCalls(lambda name: os._exit(0))
        with Store(full, eviction="lru", calls=calls) as store:
            assert begun(store) is not None
            calls.act_at(1)
        os.write(writing, b"lived")
        os._exit(1)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as said:
        assert said.read() == b""
    with Store(full, eviction="lru") as store:
        store.room.collect()
        facts = store.statistics()
        assert facts["chunk_bytes"] + facts["free_bytes"] == store.files[0].units * UNIT_BYTES


def dropped(store):
    """Drop chunks whose room another process makes, as if they had been listed before."""
    query = "SELECT id FROM chunk WHERE state = ?"
    store.room.drop([number for (number,) in store.database.rows(query, (State.TOMBED,))])


def test_chunks_that_are_dropped_while_they_give_way_are_cleared_by_one_process(full):
    missing, calls = interleaved(full, before=dropped)
    assert calls > 10
    assert not missing


def test_chunks_that_are_dropped_while_they_give_way_leave_their_room_to_the_writer(full):
    with Store(full, eviction="lru") as store:
        calls = LaterCalls(lambda name: dropped(store))
        with Store(full, eviction="lru", calls=calls) as making:
            calls.act_at(1)
            assert put(making, SPACE, prompt(4000, TOKENS)) == WHOLE
            facts = making.statistics()
            assert facts["chunk_bytes"] + facts["free_bytes"] == making.files[0].units * UNIT_BYTES
            assert not making.database.rows(
                "SELECT 1 FROM chunk WHERE state = ?", (State.QUARANTINED,)
            )


def test_a_chunk_that_is_dropped_while_it_is_filled_keeps_its_room_until_then(full):
    with Store(full, eviction="lru") as filling, Store(full, eviction="lru") as store:
        put(filling, SPACE, prompt(4000, 64))
        ((number, span),) = store.database.rows(
            "SELECT id, unit FROM chunk WHERE groups = 1 AND owner IS NULL"
        )
        assert filling.room.extend(number, 1, b"t" * 32)
        store.room.drop([number])
        held = "SELECT 1 FROM chunk WHERE unit = ?"
        assert store.database.rows(held, (span,))
        filling.room.end_writing([number])
        store.room.collect()
        assert not store.database.rows(held, (span,))


READY = f"SELECT id FROM chunk WHERE owner IS NOT NULL AND state = {State.READY:d}"


def fill(writer, ids, first, stop):
    """Write some groups of a prompt in every layer, and publish them."""
    for layer in range(SPACE.layers):
        writer.write(layer, first, rows_of(SPACE, ids, layer, first, stop))
    writer.publish(stop * GROUP_TOKENS)


@pytest.mark.parametrize("position", [None, 0, 1, 2])
def test_a_chunk_that_is_dropped_while_it_is_filled_stays_dropped(full, position):
    ids, begun, whole = prompt(4000, 3 * CHUNK_TOKENS), 2 * CHUNK_GROUPS + 3, 3 * CHUNK_GROUPS
    with Store(full, eviction="lru") as store, Store(full, eviction="lru") as other:
        writer = store.writer(SPACE, ids, None)
        # All chunks are begun; the first groups of the last one are published alone.
        for layer in range(SPACE.layers):
            writer.write(layer, 0, rows_of(SPACE, ids, layer, 0, begun))
        owned = "SELECT position, id FROM chunk WHERE owner IS NOT NULL"
        numbers = dict(store.database.rows(owned))
        assert sorted(numbers) == [0, 1, 2]
        if position == 2:
            writer.publish(begun * GROUP_TOKENS)
            assert [number for (number,) in store.database.rows(READY)] == [numbers[2]]
        if position is not None:
            other.room.drop([numbers[position]])
        fill(writer, ids, begun, whole)
        found = 3 * CHUNK_TOKENS if position is None else position * CHUNK_TOKENS
        assert (writer.published_tokens, writer.is_ended) == (found, position is not None)
        assert check(other, SPACE, ids) == found
        writer.close()
        # A miss, and no failure: the prompt is stored anew, in room that was given back.
        other.room.collect()
        assert check(store, SPACE, ids) == found
        assert store.counts.failures == other.counts.failures == 0
        assert not store.statistics()["quarantined"]
        assert put(store, SPACE, ids) == check(other, SPACE, ids) == 3 * CHUNK_TOKENS


@pytest.mark.parametrize("call", [1, 2])
def test_room_whose_headers_cannot_be_taken_is_made_by_another_writer(full, call):
    def fail(name):
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    calls = LaterCalls(fail)
    with Store(full, eviction="lru", calls=calls) as failing, Store(full, eviction="lru") as store:
        calls.act_at(call)
        assert put(failing, SPACE, prompt(3000, TOKENS)) == 0
        assert failing.counts.failures == 1
        assert put(store, SPACE, prompt(3001, TOKENS)) == WHOLE
        facts = store.statistics()
        assert facts["chunk_bytes"] + facts["free_bytes"] == store.files[0].units * UNIT_BYTES
        assert put(failing, SPACE, prompt(3000, TOKENS)) == WHOLE


class NearlyFull(DriveCalls):
    """A drive that has so many bytes for files, and says so."""

    def __init__(self, left):
        self.left = left

    def free_bytes(self, descriptor):
        return self.left

    def allocate(self, descriptor, offset, byte_count):
        self.left -= byte_count
        assert self.left >= 0, "a drive that is full takes no index either"
        super().allocate(descriptor, offset, byte_count)


@pytest.mark.parametrize("mebibytes", [8.5, 12, 60])
def test_rows_leave_the_index_some_of_a_drive(tmp_path, mebibytes):
    """Of a drive without any nothing could be found any more, nor removed."""
    space = namespace()
    Store.create(tmp_path / "store", 256 * MIB)
    calls = NearlyFull(int(mebibytes * MIB))
    with Store(tmp_path / "store", "lru", calls=calls) as store:
        for seed in range(12):
            put(store, space, prompt(seed, 2048))
        assert calls.left >= 8 * MIB
        found = [check(store, space, prompt(seed, 2048)) for seed in range(12)]
        # The twin has room for all. Else others gave way, as in a full store.
        assert (found == [2048] * 12) is (mebibytes == 60)
        assert found[-1] == 2048 * (mebibytes > 9)
        assert bool(store.counts.evicted_chunks) is (mebibytes == 12)
        assert ("No space left" in store.counts.last_failure) is (mebibytes < 9)
