# SPDX-License-Identifier: Apache-2.0
"""What comes into a store, how much is written to its drives, and what it counts."""

import random
import sqlite3
from contextlib import closing

import pytest

from hillinfer.errors import SettingsError
from hillinfer.store.eviction import EvictionPolicy, WriteBudget, make_admission
from hillinfer.store.keys import ExtentShape
from hillinfer.store.store import Store
from hillinfer.store_rules import StoreRules, StoreRulesError
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put
from hillinfer_bench.traces.chain_store import PolicyStore, block_keys
from hillinfer_bench.traces.request_trace import BLOCK_TOKENS, Request

MIB = 1 << 20
HOUR = 3600.0
SPACE = namespace()
# An extent of it.
EXTENT = 1 * MIB - 128 * 1024


@pytest.fixture
def place(tmp_path):
    Store.create(tmp_path / "store", 64 * MIB)
    return tmp_path / "store"


def written(store, name="written_day_bytes"):
    return store.metrics()[f"hillinfer_store_{name}"]


def test_the_cap_holds_for_a_day_and_across_restarts(place):
    cap = 4 * MIB
    StoreRules(max_writes_per_day=cap).write(place)
    now = [1e9]
    ids = [prompt(seed, 1024) for seed in range(12)]
    for part in (ids[:6], ids[6:]):
        with Store(place, clock=lambda: now[0]) as store:
            for one in part:
                put(store, SPACE, one)
                now[0] += 60
    with Store(place, clock=lambda: now[0]) as store:
        found = [check(store, SPACE, one) for one in ids]
        assert 2 <= sum(one > 0 for one in found) < 6
        # The first ones: nothing that came later took their place.
        assert found == sorted(found, reverse=True)
        assert 0.5 * cap < written(store) <= cap
        assert store.counts.failures == 0
        refused = store.counts.refused_chunks
        put(store, SPACE, ids[-1])
        assert store.counts.refused_chunks == refused + 1
        now[0] += 26 * HOUR
        put(store, SPACE, ids[-1])
        assert check(store, SPACE, ids[-1]) == 1024
        assert written(store) < cap / 2
        # What was ever written stays counted.
        assert written(store, "written_bytes") > cap / 2


def test_without_a_cap_the_same_is_stored(place):
    with Store(place) as store:
        for seed in range(12):
            put(store, SPACE, prompt(seed, 1024))
        assert all(check(store, SPACE, prompt(seed, 1024)) == 1024 for seed in range(12))
        assert store.counts.refused_chunks == 0
        assert written(store) > 4 * MIB


def test_two_processes_keep_to_one_cap(place):
    StoreRules(max_writes_per_day=5 * MIB).write(place)
    with Store(place) as one, Store(place) as other:
        for seed in range(10):
            put((one, other)[seed % 2], SPACE, prompt(seed, 1024))
        assert written(one) == written(other) <= 5 * MIB
        assert (
            one.counts.refused_chunks + other.counts.refused_chunks
            == 10 - one.statistics()["chunks"]
        )


def test_a_prompt_is_stored_when_it_is_seen_again(place):
    StoreRules(admission="seen-once").write(place)
    ids = prompt(1, 3000)
    with Store(place) as store:
        assert put(store, SPACE, ids) == 0
        assert (store.counts.refused_chunks, store.counts.stored_bytes) == (3, 0)
    # What was seen outlasts the process.
    with Store(place) as store:
        # Its beginning is known, the rest is not.
        longer = ids[:2048] + prompt(2, 2000)
        assert put(store, SPACE, longer) == 2048
        assert store.counts.refused_chunks == 2
        assert put(store, SPACE, ids) == 2944
        assert check(store, SPACE, ids) == 2944
        assert store.counts.failures == 0


def test_a_writer_does_not_evict_what_it_just_stored(place):
    # Larger than the store.
    ids = prompt(3, 100 * 1024)
    with Store(place) as store:
        known = put(store, SPACE, ids)
        assert 20 * 1024 < known < len(ids)
        assert check(store, SPACE, ids) == known
        assert store.counts.evicted_chunks == 0
        # It is nobody's afterwards, and gives way.
        assert store.statistics()["leases"] == 0
        assert put(store, SPACE, prompt(4, 4096)) == 4096
        assert store.counts.evicted_chunks > 0


def test_metrics_are_what_happened(place):
    ids = prompt(5, 2500)
    with Store(place) as store:
        put(store, SPACE, ids)
        check(store, SPACE, ids)
        store.find(SPACE, prompt(6, 700))
        told = store.metrics()
    assert {name.split("hillinfer_store_")[0] for name in told} == {""}
    counted = {name.removeprefix("hillinfer_store_"): value for name, value in told.items()}
    rows = 2496 * SPACE.layers * SPACE.row_bytes
    assert counted["lookups"] == 3
    assert (counted["hit_tokens"], counted["miss_tokens"]) == (2496, 2500 + 4 + 700)
    assert counted["stored_bytes"] == counted["restored_bytes"] == rows
    assert counted["evicted_chunks"] == counted["quarantined"] == counted["failures"] == 0
    assert counted["saved_seconds"] > 0
    shadows = 3 * SPACE.layers * SPACE.shadow_bytes
    assert counted["waste_bytes"] == counted["chunk_bytes"] - rows - shadows
    assert rows < counted["written_bytes"] <= counted["drive_bytes"]


def test_what_was_written_is_known_after_an_index_of_nonsense(place):
    StoreRules(max_writes_per_day=64 * MIB).write(place)
    with Store(place) as store:
        put(store, SPACE, prompt(1, 1024))
    nonsense = ("no JSON", "[]", '{"all": "many"}', '{"all": 1, "hours": 3}')
    for seed, said in enumerate(nonsense):
        with closing(sqlite3.connect(place / "index.sqlite")) as db, db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('writes', ?)", (said,))
        with Store(place) as store:
            assert written(store) < MIB
            put(store, SPACE, prompt(10 + seed, 1024))
            assert store.counts.failures == 0


@pytest.mark.parametrize(
    "said", ["[", "[]", '{"other": 1}', '{"max_writes_per_day": -1}', '{"eviction": 3}']
)
def test_rules_that_are_none_are_refused_with_the_way_out(place, said):
    (place / "rules.json").write_text(said)
    with pytest.raises(StoreRulesError, match="hillinfer store set"):
        Store(place)


@pytest.mark.parametrize("rules", [StoreRules(eviction="any"), StoreRules(admission="any")])
def test_rules_name_policies_that_are_there(place, rules):
    rules.write(place)
    with pytest.raises(SettingsError, match="choose one of"):
        Store(place)


@pytest.mark.parametrize("admission", ["always", "seen-once"])
def test_a_store_keeps_what_the_replay_of_traces_keeps(tmp_path, admission):
    """What traces judge is what runs: the same requests find the same chunks in both."""
    space = namespace(layers=2, row_bytes=1024, shadow_bytes=0)
    Store.create(tmp_path / "store", 64 * MIB)
    StoreRules(admission=admission, eviction="lru").write(tmp_path / "store")
    numbers, now = random.Random(5), [1e9]
    with Store(tmp_path / "store", clock=lambda: now[0]) as store:
        capacity = store.files[0].units // ExtentShape.of(space).units
        policy = EvictionPolicy()
        other = {"always": "seen-once", "seen-once": "always"}[admission]
        replayed, twin = (
            PolicyStore(
                capacity,
                policy,
                make_admission(name, capacity, policy, WriteBudget()),
                block_keys(2000),
            )
            for name in (admission, other)
        )
        found, like, unlike = [], [], []
        for number in range(70):
            # Documents of up to four chunks, some of which begin alike; few are asked for often.
            document = int(numbers.expovariate(0.12))
            chunks = numbers.randint(1, 4)
            ids = prompt(document // 3, 1024) + prompt(100 + document, 3 * 1024)
            blocks = (document // 3, *(100 + 3 * document + at for at in range(3)))[:chunks]
            now[0] += 10
            own = ids[: 1024 * chunks]
            prefix = store.find(space, own)
            found.append(0 if prefix is None else len(prefix.chunks))
            if prefix is not None:
                prefix.close()
            put(store, space, own, step=1024)
            request = Request(now[0], chunks * BLOCK_TOKENS, blocks)
            like.append(replayed.serve(number, request).found)
            unlike.append(twin.serve(number, request).found)
        assert found == like
        assert found != unlike
        assert store.counts.evicted_chunks > 0
        assert store.counts.failures == 0
    assert 20 < sum(found) < 70 * 4
