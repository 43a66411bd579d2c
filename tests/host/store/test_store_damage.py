# SPDX-License-Identifier: Apache-2.0
"""What is damaged is never used: a flipped bit, a swapped chunk, a lost index, a killed writer."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stored_bytes import flip, tangle

from hillinfer.store.eviction import EVICTION_POLICIES
from hillinfer.store.extent import read_sheets
from hillinfer.store.keys import UNIT_BYTES, ExtentShape
from hillinfer.store.maintenance import Parts, chains
from hillinfer.store.pool_files import StoreError, place_of
from hillinfer.store.prefix import WrongBytesError
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put


@pytest.fixture
def place(tmp_path):
    Store.create(tmp_path / "store", 128 * MIB)
    return tmp_path / "store"


def spans(place, space, ids):
    """Return where the chunks of a stored prompt begin in the pool file."""
    with Store(place) as store, store.find(space, ids) as found:
        return [chunk.record.span.offset for chunk in found.chunks]


MIB = 1 << 20
PARTS = {
    "header": lambda shape: 100,
    "ids": lambda shape: shape.body_at(0) + 5,
    "sums": lambda shape: shape.body_at(0) + 4096 + 3,
    "shadow": lambda shape: shape.shadow_at(1) + 77,
    "rows": lambda shape: shape.rows_at(2, 9) + 1234,
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_is_found_before_a_byte_is_used(place, part, number):
    space, ids = namespace(), prompt(1, 3072)
    with Store(place) as store:
        # At once: the other one of both sheets holds nothing.
        put(store, space, ids, step=4096)
    begin = spans(place, space, ids)[number]
    flip(place / "pool-0.kv", begin + PARTS[part](ExtentShape.of(space)))
    with Store(place) as store:
        if part in ("rows", "shadow"):
            with pytest.raises(WrongBytesError, match="not as they were written"):
                check(store, space, ids)
        else:
            assert check(store, space, ids) == 1024 * number
        assert store.counts.quarantined_chunks == 1
        # It is a miss from now on, what is before it is not, and it can be stored again.
        assert check(store, space, ids) == 1024 * number
        put(store, space, ids)
        assert check(store, space, ids) == 3072, store.counts.last_failure


def test_a_flipped_bit_that_nothing_depends_on_is_no_miss(place):
    """The twin: what is not flipped is found."""
    space, ids = namespace(), prompt(1, 3072)
    with Store(place) as store:
        put(store, space, ids)
    begin = spans(place, space, ids)[1]
    # Behind the last row.
    flip(place / "pool-0.kv", begin + ExtentShape.of(space).byte_count - 1)
    with Store(place) as store:
        assert check(store, space, ids) == 3072


def test_two_chunks_that_changed_places_are_misses(place):
    space = namespace()
    first, second = prompt(2, 1024), prompt(3, 1024)
    with Store(place) as store:
        put(store, space, first)
        put(store, space, second)
    (one,), (other,) = spans(place, space, first), spans(place, space, second)
    size = ExtentShape.of(space).byte_count
    with (place / "pool-0.kv").open("r+b") as file:
        file.seek(one)
        held = file.read(size)
        file.seek(other)
        moved = file.read(size)
        file.seek(one)
        file.write(moved)
        file.seek(other)
        file.write(held)
    with Store(place) as store:
        assert check(store, space, first) == check(store, space, second) == 0


def test_rows_of_another_chunk_are_not_those_of_this_one(place):
    space = namespace()
    first, second = prompt(2, 1024), prompt(3, 1024)
    with Store(place) as store:
        put(store, space, first)
        put(store, space, second)
    (one,), (other,) = spans(place, space, first), spans(place, space, second)
    shape = ExtentShape.of(space)
    data = np.fromfile(place / "pool-0.kv", np.uint8)
    at, size = shape.rows_at(0), shape.object_bytes
    data[one + at : one + at + size] = data[other + at : other + at + size]
    data.tofile(place / "pool-0.kv")
    with Store(place) as store:
        with pytest.raises(WrongBytesError, match="not as they were written"):
            check(store, space, first)
        assert check(store, space, second) == 1024


@pytest.mark.parametrize("how", ["lost", "broken", "empty"])
def test_a_lost_index_is_made_anew_from_the_drives(place, how):
    space, ids = namespace(), prompt(4, 5000)
    branch = ids[:2000] + prompt(5, 1000)
    with Store(place) as store:
        put(store, space, ids)
        put(store, space, branch)
        before = store.statistics()
    path = place / "index.sqlite"
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else b"SQLite format 3\0" + bytes(8192))
    with Store(place) as store:
        assert check(store, space, ids) == 4992
        assert check(store, space, branch) == 2944
        after = store.statistics()
        # How much was written only the index knew.
        for name in ("written_bytes", "written_day_bytes"):
            assert after.pop(name) < before.pop(name)
        assert after == before
        put(store, space, prompt(6, 3000))
        assert check(store, space, prompt(6, 3000)) == 2944
        assert check(store, space, ids) == 4992


@pytest.mark.parametrize("met_by", ["use", "verify", "nobody"])
def test_an_index_that_is_found_broken_in_use_is_made_anew_when_it_is_opened_next(place, met_by):
    """The quick look of an opening passes over entries that tables do not have."""
    space, ids = namespace(), prompt(4, 3000)
    with Store(place) as store:
        put(store, space, ids)
        (name,) = (one.name for one in chains(store.database))
    tangle(place / "index.sqlite")
    with Store(place) as store:
        steps = {"use": lambda: store.remove(name), "verify": lambda: store.verify(Parts.SHEETS)}
        if met_by in steps:
            with pytest.raises(StoreError, match="whoever opens it next makes it anew"):
                steps[met_by]()
    with Store(place) as store:
        if met_by == "nobody":
            # The twin: nothing has told of it.
            with pytest.raises(StoreError, match="malformed"):
                store.remove(name)
            return
        assert check(store, space, ids) == 2944
        assert store.remove(name) == 3
    with Store(place) as store:
        assert store.verify(Parts.SHEETS).chunks == 0


# `saved` weighs what was measured, and so what else the machine does.
@pytest.mark.parametrize("eviction", [one for one in EVICTION_POLICIES if one != "saved"])
def test_what_an_index_made_anew_holds_does_not_outlive_all_that_comes(tmp_path, eviction):
    # Of which a small store holds a few chunks. All take as long to compute, so older ones go.
    def clock():
        return 1e9

    place, space = tmp_path / "small", namespace(row_bytes=4096)
    Store.create(place, 64 * MIB)

    def stored(seeds):
        with Store(place, eviction=eviction, clock=clock) as store:
            for seed in seeds:
                put(store, space, prompt(seed, 1024))
            return store.statistics()["chunks"]

    assert stored([0, 1]) == 2
    (place / "index.sqlite").unlink()
    assert stored([2]) == 3
    held = stored(range(3, 14))
    assert 2 < held < 14
    with Store(place, eviction=eviction, clock=clock) as store:
        assert [check(store, space, prompt(seed, 1024)) for seed in (0, 1)] == [0, 0]


def test_a_lost_index_is_not_made_anew_under_another_process(place):
    with Store(place):
        (place / "index.sqlite").unlink()
        with pytest.raises(StoreError, match="end them"):
            Store(place)


@pytest.mark.parametrize("look", range(3))
def test_an_index_that_another_process_makes_meanwhile_is_not_lost(place, look, monkeypatch):
    """Meanwhile: just behind one of the looks for it that find nothing."""
    with Store(place):
        pass
    index, looks, others, exists = place / "index.sqlite", [], [], Path.exists
    index.unlink()

    def looked_for(path, **options):
        found = exists(path, **options)
        if path == index:
            looks.append(found)
            if len(looks) == look + 1:
                others.append(Store(place))
        return found

    monkeypatch.setattr(Path, "exists", looked_for)
    with Store(place) as store, others[0] as other:
        assert not any(looks[: look + 1])
        assert put(other, namespace(), prompt(0, 1024)) == 1024
        assert check(store, namespace(), prompt(0, 1024)) == 1024


WRITER = """
import os, sys, time
sys.path[:0] = sys.argv[2].split(":")
from hillinfer_bench.storing.made_prompts import namespace, prompt, put
from hillinfer.store.store import Store
with Store(sys.argv[1], eviction="lru") as store:
    print(os.getpid(), flush=True)
    for seed in range(int(sys.argv[3]), 10**6, 2):
        began = time.monotonic()
        kept = put(store, namespace(), prompt(seed, 1500), step=256)
        print(began, seed, kept, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_writer_loses_nothing_that_was_published(tmp_path, seed, warm_python):
    place = tmp_path / "small"
    Store.create(place, 64 * MIB)
    space = namespace()
    numbers, whole = np.random.default_rng(seed), 0
    for turn in range(3):
        running = [
            subprocess.Popen(
                [*warm_python, "-c", WRITER, str(place), ":".join(sys.path), str(first)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for first in (1000 * turn, 1000 * turn + 1)
        ]
        numbered = [int(one.stdout.readline()) for one in running]
        time.sleep(float(numbers.uniform(0.05, 0.6)))
        for one in numbered:
            os.kill(one, signal.SIGKILL)
        # In the order in which both began: what one stored last the other may have evicted, and one
        # that waits for a processor tells late what it stored long ago.
        told = sorted(
            (float(when), int(seed), int(kept))
            for one in running
            for when, seed, kept in map(str.split, one.communicate()[0].splitlines())
        )
        # Room that one makes is not the other's.
        assert all(kept == 1472 for *_, kept in told), told
        whole += len(told)
        with Store(place) as store:
            facts = store.statistics()
            assert facts["writing"] == facts["leases"] == 0
            for _, number, _ in told[-4:]:
                found = check(store, space, prompt(number, 1500))
                assert found == 1472, (turn, number, told, store.counts, facts)
            assert store.counts.failures == 0
            total = facts["chunk_bytes"] + facts["free_bytes"]
            assert total == store.files[0].units * UNIT_BYTES
    assert whole


def test_a_header_of_another_shape_is_none(place):
    space, ids = namespace(), prompt(9, 1024)
    with Store(place) as store:
        put(store, space, ids)
        with store.find(space, ids) as found:
            (chunk,) = found.chunks
        where = place_of(chunk.record.span, store.places.pool)
        data = np.fromfile(
            place / "pool-0.kv", np.uint8, chunk.shape.sheets_bytes, offset=chunk.record.span.offset
        )
        sheets = dict(read_sheets(data, chunk.shape, where, store.keys))
        assert sheets[chunk.slot].header == chunk.sheet.header
        for change in ("layers", "row_bytes", "shadow_bytes"):
            # As long as before, so that nothing but the header tells.
            other = replace(chunk.shape, **{change: getattr(chunk.shape, change) + 64})
            if other.body_bytes == chunk.shape.body_bytes:
                assert read_sheets(data, other, where, store.keys) == []
