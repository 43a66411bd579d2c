# SPDX-License-Identifier: Apache-2.0
"""An encrypted store does what a plain one does, tells nothing, and believes no changed byte."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from stored_bytes import flip

from hillinfer.secrecy.key_sources import KeyFile, PassphraseFile, WithoutKey
from hillinfer.secrecy.library import SecrecyError, WrongKeyError
from hillinfer.store.keys import UNIT_BYTES, ExtentShape
from hillinfer.store.maintenance import Parts, chains
from hillinfer.store.pool_files import StoreError
from hillinfer.store.prefix import WrongBytesError
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put, rows_of

MIB = 1 << 20


@pytest.fixture
def key(tmp_path):
    return KeyFile(tmp_path / "key")


@pytest.fixture
def place(tmp_path, key):
    Store.create(tmp_path / "store", 128 * MIB, key=key)
    return tmp_path / "store"


def shape_of(space):
    return ExtentShape.of(space, 16)


def begins(place, key, space, ids, salt=b""):
    """Return where the chunks of a stored prompt begin in the pool file."""
    with Store(place, key=key) as store, store.find(space, ids, salt) as found:
        return [chunk.record.span.offset for chunk in found.chunks]


def moved(path, source, target, size):
    with path.open("r+b") as file:
        file.seek(source)
        data = file.read(size)
        file.seek(target)
        file.write(data)


@pytest.mark.parametrize("tokens", [64, 640, 1024, 1088, 3000, 5120])
def test_a_prompt_is_found_to_its_last_full_group(place, key, tokens):
    space, ids = namespace(), prompt(1, tokens)
    with Store(place, key=key) as store:
        assert check(store, space, ids) == 0
        put(store, space, ids)
        assert check(store, space, ids) == tokens // 64 * 64
        assert store.counts.failures == 0
    with Store(place, key=key) as store:
        assert check(store, space, ids) == tokens // 64 * 64
        assert store.verify(Parts.ALL).wrong == 0
        assert store.counts.failures == 0


def test_a_conversation_goes_on_in_its_chunk_and_a_branch_elsewhere(place, key):
    space, ids = namespace(), prompt(5, 4000)
    for tokens in (700, 900, 1000, 1700, 2100, 4000):
        # Each turn is another process.
        with Store(place, key=key) as store:
            put(store, space, ids, tokens)
            assert check(store, space, ids) == tokens // 64 * 64
    with Store(place, key=key) as store:
        assert store.statistics()["chunks"] == 4
        branch = ids[:650] + prompt(7, 1200)
        put(store, space, branch)
        assert check(store, space, branch) == 1850 // 64 * 64
        assert check(store, space, ids) == 4000 // 64 * 64
        assert store.counts.failures == 0


def test_several_drives_share_a_prompt(tmp_path, key):
    space, ids = namespace(), prompt(12, 8192)
    Store.create(tmp_path / "a", 128 * MIB, [tmp_path / "b"], key)
    with Store(tmp_path / "a", key=key) as store:
        put(store, space, ids)
        assert check(store, space, ids) == 8192
    with Store(tmp_path / "a", key=key) as store:
        assert check(store, space, ids) == 8192


def test_what_goes_first_gives_its_room_to_others(tmp_path, key):
    Store.create(tmp_path / "small", 64 * MIB, key=key)
    # Of which the store holds fewer than three prompts.
    space = namespace(row_bytes=1024)
    with Store(tmp_path / "small", eviction="lru", key=key) as store:
        for number in range(4):
            put(store, space, prompt(100 + number, 8192))
        assert check(store, space, prompt(103, 8192)) == 8192
        assert store.counts.evicted_chunks > 0
        assert store.counts.failures == 0


# --- Nothing is told ---


def test_neither_rows_nor_tokens_nor_their_hashes_lie_on_the_drive(tmp_path, place, key):
    space, ids = namespace(), prompt(2, 1024)
    Store.create(tmp_path / "plain", 128 * MIB)
    for at, own in ((tmp_path / "plain", None), (place, key)):
        with Store(at, key=own) as store:
            put(store, space, ids)
            with store.find(space, ids) as found:
                hashes = found.chunks[0].sheet.group_keys
        held = b"".join(path.read_bytes() for path in sorted(at.rglob("*")) if path.is_file())
        rows = rows_of(space, ids, 1, 3, 4).tobytes()
        tokens = np.asarray(ids[64:128], "<u4").tobytes()
        wanted = [rows[4096:8192], rows[:64], tokens]
        assert [what in held for what in wanted] == [own is None] * 3
        # The index has hashes; only with the key do they follow from a guess of the text.
        assert all(one in held for one in hashes)
        if own is None:
            plain = hashes
        else:
            assert not set(plain) & set(hashes)
            assert not any(one in held for one in plain)


def test_two_salts_have_nothing_in_common(place, key):
    space, ids = namespace(), prompt(10, 1024)
    with Store(place, key=key) as store:
        put(store, space, ids, salt=b"one")
        assert check(store, space, ids, b"two") == check(store, space, ids) == 0
        put(store, space, ids, salt=b"two")
        for salt in (b"one", b"two"):
            assert check(store, space, ids, salt) == 1024
        with store.find(space, ids, b"one") as one, store.find(space, ids, b"two") as two:
            assert not set(one.chunks[0].sheet.group_keys) & set(two.chunks[0].sheet.group_keys)
    table = json.loads((place / "keys.json").read_text())
    assert len(table["salts"]) == 2


def test_without_its_key_a_store_still_tells_sizes(place, key):
    space = namespace()
    with Store(place, key=key) as store:
        put(store, space, prompt(3, 3000))
        before, names = store.statistics(), chains(store.database)
    with Store(place, key=WithoutKey()) as store:
        assert store.statistics() == before
        assert [one.tokens for one in chains(store.database)] == [2944]
        # A lookup is a miss, a look at the bytes an error; neither changes anything.
        assert check(store, space, prompt(3, 3000)) == 0
        assert "encrypted" in store.counts.last_failure
        assert store.writer(space, prompt(4, 1000)) is None
        with pytest.raises(SecrecyError, match="give its key"):
            store.verify(Parts.SHEETS)
    with Store(place, key=key) as store:
        assert chains(store.database)[0].name == names[0].name
        assert check(store, space, prompt(3, 3000)) == 2944


# --- Wrong and lost keys ---


def test_a_store_without_its_key_or_with_another_is_refused_and_stays_whole(tmp_path, place, key):
    space, ids = namespace(), prompt(1, 3000)
    with Store(place, key=key) as store:
        put(store, space, ids)
    before = (place / "pool-0.kv").read_bytes()
    other = tmp_path / "other"
    other.write_text("0" * 64)
    other.chmod(0o600)
    for given, error, says in (
        (None, SecrecyError, "is encrypted: give its key with --key-file"),
        (KeyFile(other), WrongKeyError, "not the key of the store"),
        (KeyFile(tmp_path / "gone"), SecrecyError, "is not there"),
    ):
        with pytest.raises(error, match=says):
            Store(place, key=given)
    assert (place / "pool-0.kv").read_bytes() == before
    with Store(place, key=key) as store:
        assert check(store, space, ids) == 2944


def test_a_lost_table_of_keys_is_no_plain_store(place, key):
    (place / "keys.json").unlink()
    for given in (None, key):
        with pytest.raises(SecrecyError):
            Store(place, key=given)


def test_a_plain_store_opens_as_ever_and_refuses_a_key(tmp_path, key):
    Store.create(tmp_path / "plain", 64 * MIB)
    about = json.loads((tmp_path / "plain" / "store.json").read_text())
    assert about["version"] == 1
    assert "cipher" not in about
    assert not (tmp_path / "plain" / "keys.json").exists()
    with Store(tmp_path / "plain") as store:
        put(store, namespace(), prompt(1, 1000))
    key.path.write_text("0" * 64)
    key.path.chmod(0o600)
    with pytest.raises(SecrecyError, match="is not encrypted, and a key was given"):
        Store(tmp_path / "plain", key=key)
    with Store(tmp_path / "plain", key=WithoutKey()) as store:
        assert check(store, namespace(), prompt(1, 1000)) == 960


def test_an_older_version_refuses_an_encrypted_store(place):
    """It knows version 1 alone, and would take every chunk for a damaged one."""
    assert json.loads((place / "store.json").read_text())["version"] == 2


def test_a_passphrase_opens_what_it_made(tmp_path):
    file = tmp_path / "passphrase"
    file.write_text("correct horse\n")
    file.chmod(0o600)
    Store.create(tmp_path / "store", 64 * MIB, key=PassphraseFile(file))
    with Store(tmp_path / "store", key=PassphraseFile(file)) as store:
        put(store, namespace(), prompt(1, 1000))
    with Store(tmp_path / "store", key=PassphraseFile(file)) as store:
        assert check(store, namespace(), prompt(1, 1000)) == 960
    file.write_text("wrong horse\n")
    with pytest.raises(WrongKeyError):
        Store(tmp_path / "store", key=PassphraseFile(file))


# --- Changed bytes ---

PARTS = {
    "clear": lambda shape: 40,
    "header": lambda shape: 300,
    "ids": lambda shape: shape.body_at(0) + 5,
    "sums": lambda shape: shape.body_at(0) + 4096 + 3,
    "shadow": lambda shape: shape.shadow_at(1) + 77,
    "rows": lambda shape: shape.rows_at(2, 9) + 1234,
    "tag": lambda shape: shape.tags_at + 16 * (shape.page_layout.slots.size - 1) + 3,
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_is_found_before_a_byte_is_used(place, key, part, number):
    space, ids = namespace(), prompt(1, 3072)
    with Store(place, key=key) as store:
        # At once: the other one of both sheets holds nothing.
        put(store, space, ids, step=4096)
    begin = begins(place, key, space, ids)[number]
    flip(place / "pool-0.kv", begin + PARTS[part](shape_of(space)))
    with Store(place, key=key) as store:
        if part in ("rows", "shadow", "tag"):
            with pytest.raises(WrongBytesError, match="not as they were written"):
                check(store, space, ids)
        else:
            assert check(store, space, ids) == 1024 * number
        assert store.counts.quarantined_chunks == 1
        assert check(store, space, ids) == 1024 * number
        put(store, space, ids)
        assert check(store, space, ids) == 3072


@pytest.mark.parametrize("part", ["rows", "shadow", "tag", "ids"])
def test_verify_finds_a_flipped_bit(place, key, part):
    space, ids = namespace(), prompt(1, 1024)
    with Store(place, key=key) as store:
        put(store, space, ids, step=4096)
        assert store.verify(Parts.ALL).wrong == 0
    (begin,) = begins(place, key, space, ids)
    flip(place / "pool-0.kv", begin + PARTS[part](shape_of(space)))
    with Store(place, key=key) as store:
        assert store.verify(Parts.ALL).wrong == 1


def test_a_flipped_bit_that_nothing_depends_on_is_no_miss(place, key):
    """The twin: what is not flipped is found."""
    space, ids = namespace(), prompt(1, 3072)
    with Store(place, key=key) as store:
        put(store, space, ids)
    begin = begins(place, key, space, ids)[1]
    flip(place / "pool-0.kv", begin + shape_of(space).byte_count - 1)
    with Store(place, key=key) as store:
        assert check(store, space, ids) == 3072


@pytest.mark.parametrize("what", ["all", "rows and tags"])
def test_chunks_of_one_salt_that_changed_places_are_misses(place, key, what):
    space, shape = namespace(), shape_of(namespace())
    first, second = prompt(2, 1024), prompt(3, 1024)
    with Store(place, key=key) as store:
        put(store, space, first)
        put(store, space, second)
    (one,), (other,) = begins(place, key, space, first), begins(place, key, space, second)
    start = 0 if what == "all" else shape.sheets_bytes
    moved(place / "pool-0.kv", other + start, one + start, shape.byte_count - start)
    with Store(place, key=key) as store:
        if what == "all":
            assert check(store, space, first) == 0
        else:
            with pytest.raises(WrongBytesError):
                check(store, space, first)
        assert check(store, space, second) == 1024


def test_an_older_writers_pages_are_not_believed(place, key):
    """The same extent under the same data key: what an earlier turn left unpublished comes back."""
    space, shape = namespace(), shape_of(namespace())
    ids = prompt(5, 512)
    with Store(place, key=key) as store:
        put(store, space, ids)
        # A writer that dies: its rows and tags are on the drive.
        longer = ids + prompt(6, 512)
        with store.find(space, longer) as found:
            writer = store.writer(space, longer, found)
            for layer in range(3):
                writer.write(layer, 8, rows_of(space, longer, layer, 8, 16))
            writer.close()
    (begin,) = begins(place, key, space, ids)
    shutil.copy(place / "pool-0.kv", place / "older")
    other = ids + prompt(7, 512)
    with Store(place, key=key) as store:
        put(store, space, other)
        assert check(store, space, other) == 1024
    assert begins(place, key, space, other) == [begin]
    older, newer = ((place / name).read_bytes() for name in ("older", "pool-0.kv"))
    at, size = begin + shape.rows_at(1, 9), shape.group_bytes
    assert older[at : at + size] != newer[at : at + size]
    with (place / "pool-0.kv").open("r+b") as file:
        file.seek(at)
        file.write(older[at : at + size])
    with Store(place, key=key) as store, pytest.raises(WrongBytesError):
        check(store, space, other)


# --- The index ---


@pytest.mark.parametrize("how", ["lost", "broken"])
def test_a_lost_index_is_made_anew_with_the_key(place, key, how):
    space, ids = namespace(), prompt(4, 5000)
    with Store(place, key=key) as store:
        put(store, space, ids, salt=b"one")
        put(store, space, prompt(5, 3000))
        before = store.statistics()
    path = place / "index.sqlite"
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(b"SQLite format 3\0" + bytes(8192))
    with pytest.raises(SecrecyError, match="give its key"):
        Store(place, key=WithoutKey())
    with Store(place, key=key) as store:
        # What was written is counted in the index, and anew.
        assert store.statistics() == before | {"written_bytes": 0, "written_day_bytes": 0}
        assert check(store, space, ids, b"one") == 4992
        assert check(store, space, prompt(5, 3000)) == 2944
        put(store, space, prompt(6, 3000))
        assert check(store, space, prompt(6, 3000)) == 2944
        assert store.counts.failures == 0


def test_what_was_written_before_an_index_was_lost_is_not_believed_after_it(place, key):
    """Generations begin again at what the headers say; what is sealed does not depend on them."""
    space = namespace()
    with Store(place, key=key) as store:
        put(store, space, prompt(1, 1024))
        writer = store.writer(space, prompt(2, 1024))
        writer.write(0, 0, rows_of(space, prompt(2, 1024), 0, 0, 16))
        writer.close()
    before = (place / "pool-0.kv").read_bytes()
    (place / "index.sqlite").unlink()
    with Store(place, key=key) as store:
        put(store, space, prompt(3, 1024))
    (begin,) = begins(place, key, space, prompt(3, 1024))
    at = begin + shape_of(space).rows_at(0)
    old, new = before[at : at + 4096], (place / "pool-0.kv").read_bytes()[at : at + 4096]
    rows = [rows_of(space, prompt(seed, 1024), 0, 0, 1).tobytes()[:4096] for seed in (2, 3)]
    streams = [
        bytes(a ^ b for a, b in zip(sealed, text, strict=True))
        for sealed, text in zip((old, new), rows, strict=True)
    ]
    # The same place, the same data key: were a nonce used twice, these would be the same.
    assert old != bytes(4096)
    assert streams[0] != streams[1]


# --- Forgetting ---


def test_a_forgotten_salt_is_gone_and_others_stay(place, key):
    space, ids = namespace(), prompt(10, 3000)
    with Store(place, key=key) as store:
        for salt in (b"one", b"two"):
            put(store, space, ids, salt=salt)
    held = (place / "keys.json").read_text()
    with Store(place, key=key) as store:
        chunks = store.statistics()["chunks"]
        assert check(store, space, ids, b"one") == 2944
        assert store.forget(b"one") == chunks // 2
        assert store.forget(b"one") == 0
        assert store.statistics()["chunks"] == chunks // 2
        assert check(store, space, ids, b"one") == 0
        assert check(store, space, ids, b"two") == 2944
        put(store, space, ids, salt=b"one")
        assert check(store, space, ids, b"one") == 2944
    assert held != (place / "keys.json").read_text()


def test_what_was_sealed_by_a_forgotten_key_is_not_made_anew_in_the_index(place, key):
    space, ids = namespace(), prompt(10, 3000)
    with Store(place, key=key) as store:
        for salt in (b"one", b"two"):
            put(store, space, ids, salt=salt)
    table = json.loads((place / "keys.json").read_text())
    table["salts"] = table["salts"][1:]
    (place / "keys.json").write_text(json.dumps(table))
    (place / "index.sqlite").unlink()
    with Store(place, key=key) as store:
        assert store.statistics()["chunks"] == 3
        assert check(store, space, ids, b"one") == 0
        assert check(store, space, ids, b"two") == 2944


def test_a_key_that_others_may_have_is_not_forgotten(place, key):
    with Store(place, key=key) as store:
        put(store, namespace(), prompt(1, 1024))
        with Store(place, key=key) as other, pytest.raises(StoreError, match="end them first"):
            other.forget(b"")
        assert check(store, namespace(), prompt(1, 1024)) == 1024


def test_a_plain_store_forgets_no_key(tmp_path):
    Store.create(tmp_path / "plain", 64 * MIB)
    with Store(tmp_path / "plain") as store, pytest.raises(SecrecyError, match="store rm"):
        store.forget(b"")


# --- Kills ---

WRITER = """
import os, sys
sys.path[:0] = sys.argv[2].split(":")
from pathlib import Path
from hillinfer.secrecy.key_sources import KeyFile
from hillinfer_bench.storing.made_prompts import namespace, prompt, put
from hillinfer.store.store import Store
with Store(sys.argv[1], eviction="lru", key=KeyFile(Path(sys.argv[4]))) as store:
    print(os.getpid(), flush=True)
    for seed in range(int(sys.argv[3]), 10**6, 2):
        put(store, namespace(), prompt(seed, 1500), step=256, salt=b"%d" % (seed // 2 % 3))
        print(seed, flush=True)
"""


# How a process is killed is not a matter of the key: see test_store_damage.py for more of it.
@pytest.mark.parametrize("seed", range(1))
def test_a_killed_writer_loses_nothing_that_was_published(tmp_path, key, seed, warm_python):
    place, space = tmp_path / "small", namespace()
    Store.create(place, 64 * MIB, key=key)
    numbers = np.random.default_rng(seed)
    for turn in range(3):
        command = [*warm_python, "-c", WRITER, str(place), ":".join(sys.path)]
        running = [
            subprocess.Popen(
                [*command, str(first), str(key.path)], stdout=subprocess.PIPE, text=True
            )
            for first in (1000 * turn, 1000 * turn + 1)
        ]
        numbered = [int(one.stdout.readline()) for one in running]
        time.sleep(float(numbers.uniform(0.05, 0.6)))
        # Both at once: one that goes on may evict what the other stored last.
        for one in numbered:
            os.kill(one, signal.SIGKILL)
        told = []
        for one in running:
            told.append([int(line) for line in one.communicate()[0].split()])
        with Store(place, key=key) as store:
            facts = store.statistics()
            assert facts["writing"] == facts["leases"] == 0
            for seeds in told:
                for number in seeds[-2:]:
                    salt = b"%d" % (number // 2 % 3)
                    assert check(store, space, prompt(number, 1500), salt) == 1472
            assert store.counts.failures == 0
            total = facts["chunk_bytes"] + facts["free_bytes"]
            assert total == store.files[0].units * UNIT_BYTES
