# SPDX-License-Identifier: Apache-2.0
"""What is found again takes no read of a drive, and is never what lay there before."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from hillinfer.secrecy.key_sources import KeyFile
from hillinfer.secrecy.pages import Place
from hillinfer.secrecy.store_keys import NoKeys
from hillinfer.store.extent import Header, Sheet, plain_sheets, read_sheets
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    CHUNK_TOKENS,
    Expected,
    ExtentShape,
    checksum,
    group_keys,
    native_chain,
    root_key,
    token_words,
)
from hillinfer.store.store import Store
from hillinfer_bench.storing.damage import CountedCalls
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put

MIB = 1 << 20


@pytest.fixture(params=[None, "key"], ids=["plain", "sealed"])
def key(request, tmp_path):
    return request.param and KeyFile(tmp_path / request.param)


@pytest.fixture
def place(tmp_path, key):
    Store.create(tmp_path / "store", 64 * MIB, key=key)
    return tmp_path / "store"


def none(name):
    """Let a call be."""


def test_finding_again_reads_nothing(place, key):
    space, ids = namespace(), prompt(1, 5000)
    with Store(place, key=key) as store:
        put(store, space, ids)
    calls = CountedCalls(0, none)
    with Store(place, key=key, calls=calls) as store:
        store.find(space, ids).close()
        made = calls.made
        with store.find(space, ids) as found:
            assert found.tokens == 4992
        assert calls.made == made
        # The twin: what was not found before is read.
        put(store, space, prompt(2, 1024))
        assert calls.made > made
        assert check(store, space, ids) == 4992


def test_what_was_found_is_compared_anew_where_another_lies_in_its_place(place, key):
    # Of which the store holds fewer than three prompts.
    space, ids = namespace(row_bytes=1024), prompt(3, 8192)
    with (
        Store(place, key=key, eviction="lru") as reader,
        Store(place, key=key, eviction="lru") as writer,
    ):
        put(reader, space, ids)
        assert check(reader, space, ids) == 8192
        others = [prompt(100 + number, 8192) for number in range(3)]
        for other in others:
            put(writer, space, other)
        assert check(reader, space, ids) < 8192
        assert check(reader, space, others[-1]) == 8192
        assert reader.counts.failures == writer.counts.failures == 0


def test_a_chunk_that_went_on_is_found_to_its_new_end(place, key):
    space, ids = namespace(), prompt(4, 2000)
    with Store(place, key=key) as reader, Store(place, key=key) as writer:
        put(writer, space, ids, 1300)
        assert check(reader, space, ids) == 1280
        put(writer, space, ids)
        assert check(reader, space, ids) == 1984


def test_what_follows_a_quarantined_chunk_goes_first(place, key):
    space, ids = namespace(), prompt(8, 4096)
    with Store(place, key=key) as store:
        put(store, space, ids, step=8192)
        with store.find(space, ids) as found:
            numbers = [chunk.record.number for chunk in found.chunks]
            place_of_second = found.chunks[1].record.span.offset
    with (place / "pool-0.kv").open("r+b") as file:
        file.seek(place_of_second)
        file.write(bytes(8192))
    with Store(place, key=key) as store:
        assert check(store, space, ids) == 1024
        worths = dict(store.database.rows("SELECT id, worth FROM chunk"))
    assert [worths[number] < -1e200 for number in numbers] == [False, False, True, True]


def test_every_lease_ends(place, key):
    space, ids = namespace(), prompt(5, 4096)
    with Store(place, key=key) as store:
        put(store, space, ids)
        with store.find(space, ids), store.find(space, ids[:2048]):
            assert store.statistics()["leases"] == 4
        assert store.statistics()["leases"] == 0


@pytest.mark.parametrize("chain_of", [native_chain, lambda *given: None])
def test_a_key_is_sha256_of_the_key_before_and_its_group(chain_of):
    ids, before = prompt(6, 1000), b"x" * 32
    expected = []
    for start in range(0, 960, 64):
        group = np.array(ids[start : start + 64], "<u4").tobytes()
        before = hashlib.sha256(before + group).digest()
        expected.append(before)
    assert group_keys(b"x" * 32, ids, chain_of=chain_of) == expected
    ids[70] ^= 1
    changed = group_keys(b"x" * 32, ids, chain_of=chain_of)
    assert changed[0] == expected[0]
    assert not set(changed[1:]) & set(expected)
    assert group_keys(b"x" * 32, ids[:63], chain_of=chain_of) == []


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint32)])
def test_token_numbers_of_any_kind_have_the_same_keys(kind):
    ids = prompt(6, 200)
    expected = group_keys(b"x" * 32, ids)
    assert len(expected) == 3
    assert group_keys(b"x" * 32, kind(ids)) == expected
    ids[100] ^= 1
    assert group_keys(b"x" * 32, kind(ids))[:2] != expected[:2]


@pytest.mark.parametrize("wrong", [-1, 1 << 32])
def test_a_token_number_that_is_none_is_refused(wrong):
    assert token_words([]).size == 0
    with pytest.raises(OverflowError):
        token_words([1, wrong])


# --- The index made anew ---


def test_extents_of_several_models_and_gaps_between_them_are_found_anew(tmp_path, key):
    place = tmp_path / "store"
    Store.create(place, 256 * MIB, key=key)
    spaces = [namespace(), namespace(layers=7), namespace(row_bytes=2048, shadow_bytes=0)]
    prompts = [prompt(10 + number, 2048) for number in range(12)]
    with Store(place, key=key) as store:
        for number, ids in enumerate(prompts):
            put(store, spaces[number // 2 % 3], ids)
        for number in (1, 4, 8):
            with store.find(spaces[number // 2 % 3], prompts[number]) as found:
                name = found.chunks[-1].sheet.header.key.hex()[:12]
            store.remove(name)
        kept = [check(store, spaces[number // 2 % 3], ids) for number, ids in enumerate(prompts)]
        before = store.statistics()
    assert sorted(set(kept)) == [0, 2048]
    (place / "index.sqlite").unlink()
    with Store(place, key=key) as store:
        found = [check(store, spaces[number // 2 % 3], ids) for number, ids in enumerate(prompts)]
        assert found == kept
        # What was written before is not known to an index that is made anew.
        assert store.statistics() == before | {"written_bytes": 0, "written_day_bytes": 0}


@pytest.mark.parametrize("extra", [0, 100_000])
def test_extents_of_two_sizes_are_found_anew(tmp_path, extra):
    """Those with room behind their planes take two units, others of the model one."""
    place = tmp_path / "store"
    Store.create(place, 64 * MIB)
    space, prompts = namespace(layers=1, row_bytes=64), [prompt(20 + i, 1024) for i in range(5)]
    with Store(place) as store:
        put(store, space, prompts[0], extra_bytes=extra)
        for ids in prompts[1:]:
            put(store, space, ids)
    (place / "index.sqlite").unlink()
    with Store(place) as store:
        found = [store.find(space, ids) for ids in prompts]
        units = [one.chunks[0].record.span.units for one in found]
        for one in found:
            one.close()
        assert units == [2 if extra else 1, 1, 1, 1, 1]
        assert [check(store, space, ids) for ids in prompts] == [1024] * 5


OPENER = """
import sys
sys.path[:0] = sys.argv[2].split(":")
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put
from hillinfer.store.pool_files import StoreError
from hillinfer.store.store import Store
import time
own = int(sys.argv[3])
while True:
    try:
        store = Store(sys.argv[1])
        break
    except StoreError as error:
        assert "end them" in str(error), error
        time.sleep(0.01)
with store:
    put(store, namespace(), prompt(own, 3000), step=256)
    print(check(store, namespace(), prompt(own, 3000)), check(store, namespace(), prompt(7, 3000)))
    print(store.counts.last_failure)
"""


def test_processes_that_find_no_index_make_one_and_lose_nothing_of_each_other(
    tmp_path, warm_python
):
    place = tmp_path / "store"
    Store.create(place, 64 * MIB)
    with Store(place) as store:
        put(store, namespace(), prompt(7, 3000))
    (place / "index.sqlite").unlink()
    # What a killed rebuild leaves behind.
    left = place / ".hillinfer-0123456789abcdef01234567.scratch"
    left.mkdir(mode=0o700)
    (left / "index.sqlite").write_bytes(bytes(100))
    command = [*warm_python, "-c", OPENER, str(place), ":".join(sys.path)]
    running = [
        subprocess.Popen([*command, str(30 + number)], stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    assert [one.communicate()[0].split() for one in running] == [["2944", "2944"]] * 3
    with Store(place) as store:
        assert [check(store, namespace(), prompt(30 + number, 3000)) for number in range(3)] == [
            2944
        ] * 3
    assert not left.exists()


POOL = bytes(range(16))
PAGE = 4096


def written_sheets(chunks=3, tail=5):
    """Return what some extents of a prompt begin with, and what a lookup expects of them."""
    space = namespace()
    shape = ExtentShape.of(space)
    ids = np.array(prompt(5, (chunks - 1) * CHUNK_TOKENS + tail * 64), np.uint32)
    keys = group_keys(root_key(space.digest), ids)
    data = np.zeros((chunks, shape.sheets_bytes), np.uint8)
    expected = []
    random = np.random.default_rng(1)
    for number in range(chunks):
        first = number * CHUNK_GROUPS
        own, parent = keys[first : first + CHUNK_GROUPS], [root_key(space.digest), *keys][first]
        words = np.zeros(CHUNK_TOKENS, np.uint32)
        words[: len(own) * 64] = ids[first * 64 :][: len(own) * 64]
        sizes = shape.layers, shape.row_bytes, shape.shadow_bytes
        header = Header(POOL, space.digest, parent, own[-1], 7, number, len(own), *sizes, 0.5, 1)
        sums = random.integers(0, 1 << 32, (shape.layers, CHUNK_GROUPS + 1), np.uint32)
        sheet = Sheet(header, words, sums[:, 1:].copy(), sums[:, 0].copy())
        places = number % 2 * PAGE, shape.body_at(number % 2)
        for place, part in zip(places, sheet.packed(), strict=True):
            data[number, place : place + len(part)] = np.frombuffer(part, np.uint8)
        expected.append(Expected(space.digest, parent, own, words.tobytes()[: len(own) * 256]))
    return data, shape, expected


def found_one_by_one(data, shape, expected):
    """Return the sheets of a prompt as they are found in extents that are looked at singly."""
    found = []
    for number, (part, wanted) in enumerate(zip(data, expected, strict=True)):
        every = read_sheets(part, shape, Place(POOL, 0, number), NoKeys(), wanted)
        found.append([(slot, one) for slot, one in every if one.covered_of(wanted)])
    return found


def said(found):
    return [
        [
            (slot, one.header, one.packed(), one.group_keys, one.covered_of(wanted))
            for slot, one in own
        ]
        for own, wanted in found
    ]


# Of a header: magic, version, store, namespace, parent, key, generation, groups, layers, sizes, sum
# of the body, nothing, its own sum; of the body: token numbers, sums and what is behind them.
@pytest.mark.parametrize("is_summed", [False, True])
@pytest.mark.parametrize(
    "place", [0, 8, 20, 40, 70, 127, 130, 140, 144, 148, 152, 168, 2000, PAGE - 2, "ids", "sums"]
)
def test_sheets_that_are_matched_at_once_are_those_that_are_read_one_by_one(place, is_summed):
    """Whatever byte of one is another, with a sum that fits it or without."""
    data, shape, expected = written_sheets()
    whole = plain_sheets(data, shape, POOL, expected)
    assert [len(own) for own in whole] == [1, 1, 1]
    every = zip(found_one_by_one(data, shape, expected), expected, strict=True)
    assert said(zip(whole, expected, strict=True)) == said(every)
    # The second extent has its sheet in the second slot.
    own, body = data[1], shape.body_at(1)
    at = {"ids": body + 400, "sums": body + 4 * CHUNK_TOKENS + 3}.get(place, place)
    own[at if isinstance(place, str) else PAGE + at] ^= 1
    if is_summed:
        if isinstance(place, str):
            sum_of_body = checksum(own[body:].tobytes(), shape.body_bytes)
            own[PAGE + 168 : PAGE + 172] = np.array([sum_of_body], "<u4").view(np.uint8)
        sum_of_page = checksum(own[PAGE:].tobytes(), PAGE - 4)
        own[2 * PAGE - 4 : 2 * PAGE] = np.array([sum_of_page], "<u4").view(np.uint8)
    found = plain_sheets(data, shape, POOL, expected)
    every = found_one_by_one(data, shape, expected)
    assert said(zip(found, expected, strict=True)) == said(zip(every, expected, strict=True))
    # Where its sum fits: the generation, what means nothing, and sums of rows.
    is_whole = is_summed and place in (130, 2000, PAGE - 2, "sums")
    assert [len(own) for own in found] == [1, int(is_whole), 1]


def test_a_sheet_that_has_more_than_is_wanted_is_looked_at_by_itself():
    data, shape, expected = written_sheets()
    last = expected[-1]
    expected[-1] = last._replace(keys=last.keys[:3], ids=last.ids[: 3 * 256])
    assert [len(own) for own in plain_sheets(data, shape, POOL, expected)] == [1, 1, 0]
    ((_, sheet),) = found_one_by_one(data, shape, expected)[-1]
    assert sheet.covered_of(expected[-1]) == 3
    expected[0] = expected[0]._replace(keys=expected[0].keys[:3])
    assert plain_sheets(data, shape, POOL, expected) == [[], [], []]
