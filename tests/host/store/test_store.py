# SPDX-License-Identifier: Apache-2.0
"""What is stored is found: by whoever has the same tokens and namespace, and by nobody else."""

import os
import stat
import subprocess
import sys

import pytest

from hillinfer.store.keys import UNIT_BYTES
from hillinfer.store.pool_files import StoreError
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put


@pytest.fixture
def place(tmp_path):
    Store.create(tmp_path / "store", 256 * MIB)
    return tmp_path / "store"


@pytest.fixture
def store(place):
    with Store(place) as opened:
        yield opened


@pytest.mark.parametrize("tokens", [64, 640, 1024, 1088, 3000, 5120])
def test_a_prompt_is_found_to_its_last_full_group(store, tokens):
    space, ids = namespace(), prompt(1, tokens)
    assert check(store, space, ids) == 0
    put(store, space, ids)
    assert check(store, space, ids) == tokens // 64 * 64
    assert store.counts.failures == 0


def test_another_process_finds_it_after_a_restart(place):
    space, ids = namespace(), prompt(2, 2500)
    with Store(place) as store:
        put(store, space, ids)
    with Store(place) as store:
        assert check(store, space, ids) == 2496


def test_prompts_share_what_they_begin_with(store):
    space = namespace()
    first = prompt(3, 3000)
    other = first[:1700] + prompt(4, 1500)
    put(store, space, first)
    assert check(store, space, other) == 1664
    put(store, space, other)
    assert check(store, space, other) == 3200 // 64 * 64
    assert check(store, space, first) == 2944


def test_a_conversation_goes_on_in_the_chunk_it_ended_in(store):
    space, ids = namespace(), prompt(5, 4000)
    for tokens in (700, 900, 1000, 1700, 2100, 4000):
        put(store, space, ids, tokens)
        assert check(store, space, ids) == tokens // 64 * 64
    assert store.statistics()["chunks"] == 4


def test_a_branch_copies_and_leaves_the_other_whole(store):
    space, ids = namespace(), prompt(6, 700)
    put(store, space, ids)
    branches = [ids[:650] + prompt(seed, 1200) for seed in (7, 8)]
    for branch in branches:
        put(store, space, branch)
    for branch in branches:
        assert check(store, space, branch) == 1850 // 64 * 64
    assert check(store, space, ids) == 640


@pytest.mark.parametrize(
    "other",
    [
        namespace(weights="1" * 64),
        namespace(rope=1e5),
        namespace(stored="bfloat16"),
        namespace(row_bytes=512),
        namespace(layers=4),
        namespace(shadow_bytes=0),
    ],
    ids=["weights", "rope", "type", "row", "layers", "shadow"],
)
def test_nothing_is_found_in_another_namespace(store, other):
    ids = prompt(9, 2048)
    put(store, namespace(), ids)
    assert check(store, other, ids) == 0
    assert check(store, namespace(), ids) == 2048


def test_nothing_is_found_with_another_salt(store):
    space, ids = namespace(), prompt(10, 1024)
    put(store, space, ids, salt=b"one")
    assert check(store, space, ids, b"two") == check(store, space, ids) == 0
    assert check(store, space, ids, b"one") == 1024


def test_a_store_keeps_to_its_size_and_evicts_what_was_used_longest_ago(tmp_path):
    place = tmp_path / "small"
    Store.create(place, 64 * MIB)
    # Of which the store holds fewer than three prompts.
    space = namespace(row_bytes=1024)
    with Store(place, eviction="lru") as store:
        prompts = [prompt(100 + number, 8192) for number in range(3)]
        for ids in prompts:
            put(store, space, ids)
        found = [check(store, space, ids) for ids in prompts]
        assert found[-1] == 8192
        assert found[0] < 8192
        assert store.counts.evicted_chunks > 0
        assert store.counts.failures == 0
        # What goes first is the end of a chain: the rest of it can still be used.
        assert sum(found) > 2 * 8192
    assert disk_bytes(place) <= 64 * MIB


def test_a_leased_prefix_is_not_evicted(tmp_path):
    Store.create(tmp_path / "small", 64 * MIB)
    # Of which the store holds fewer than three prompts.
    space, ids = namespace(row_bytes=1024), prompt(11, 8192)
    with Store(tmp_path / "small", eviction="lru") as store:
        put(store, space, ids)
        with store.find(space, ids) as found:
            for number in range(3):
                put(store, space, prompt(200 + number, 8192))
            assert store.counts.evicted_chunks > 0
            assert sum(len(rows) for _, _, rows in found.stream()) == 3 * 8192
        for number in range(3):
            put(store, space, prompt(300 + number, 8192))
        assert check(store, space, ids) < 8192


def test_several_drives_share_a_prompt(tmp_path):
    space, ids = namespace(), prompt(12, 8192)
    Store.create(tmp_path / "a", 128 * MIB, [tmp_path / "b", tmp_path / "c"])
    with Store(tmp_path / "a") as store:
        put(store, space, ids)
        drives = {chunk.record.span.drive for chunk in store.find(space, ids).chunks}
        assert drives == {0, 1, 2}
        assert check(store, space, ids) == 8192


def test_everything_is_its_owners_alone(place):
    put_one = namespace(), prompt(13, 1024)
    umask = os.umask(0)
    try:
        with Store(place) as store:
            put(store, *put_one)
            for path in [place, *place.rglob("*")]:
                assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path
    finally:
        os.umask(umask)


MIB = 1 << 20
WRITER = """
import os, sys
sys.path[:0] = sys.argv[2].split(":")
from hillinfer_bench.storing.made_prompts import namespace, prompt, put
from hillinfer.store.store import Store
with Store(sys.argv[1]) as store:
    put(store, namespace(), prompt(14, 9000), step=128)
    print(store.counts.last_failure)
"""


def test_processes_that_store_the_same_store_it_once(place, warm_python):
    command = [*warm_python, "-c", WRITER, str(place), ":".join(sys.path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [one.communicate()[0].strip() for one in running] == [""] * 3
    with Store(place) as store:
        assert check(store, namespace(), prompt(14, 9000)) == 8960
        assert store.statistics()["chunks"] == 9


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda place: (place / "store.json").write_text("{}"), "make the store anew"),
        (lambda place: (place / "store.json").unlink(), "hillinfer store init"),
        (lambda place: (place / "pool-0.kv").write_bytes(bytes(1 << 20)), "another store's file"),
    ],
)
def test_what_is_no_store_is_refused_with_the_way_out(place, break_it, says):
    with Store(place):
        pass
    break_it(place)
    with pytest.raises(StoreError, match=says):
        Store(place)


def test_a_file_that_another_process_is_about_to_mark_is_marked_by_both(place):
    """It has taken its room and not said yet whose file it is."""
    (place / "pool-0.kv").write_bytes(bytes(UNIT_BYTES))
    with Store(place) as store:
        put(store, namespace(), prompt(1, 1000))
    with Store(place) as store:
        assert check(store, namespace(), prompt(1, 1000)) == 960


def disk_bytes(place):
    """Return what a directory takes on the drive."""
    return sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())
