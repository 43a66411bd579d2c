# SPDX-License-Identifier: Apache-2.0
"""Processes read, store and evict in one store, one is killed, and nothing is left of that."""

from hillinfer.store.store import Store
from hillinfer_bench.storing.damage import SPACE, Losses, look_at_room
from hillinfer_bench.storing.made_prompts import prompt, put
from hillinfer_bench.storing.mixed_load import mixed_load

SECONDS = 2.0


def test_two_processes_leave_nothing_behind(tmp_path):
    told = mixed_load(tmp_path / "store", 2, SECONDS, SECONDS / 2)
    assert told.losses.what == []
    assert told.killed >= 1
    assert len(told.work) == 2
    assert sum(one.lookups for one in told.work) > 0
    assert sum(one.stored_tokens for one in told.work) > 0


def test_what_is_left_behind_is_seen(tmp_path):
    """The twin: a lease and a strange file are losses."""
    place, losses = tmp_path / "store", Losses()
    Store.create(place, 64 << 20)
    with Store(place) as store:
        put(store, SPACE, prompt(1, 1024))
        look_at_room(store, place, losses)
        assert losses.leaks == 0
        with store.find(SPACE, prompt(1, 1024)):
            look_at_room(store, place, losses)
            assert losses.leaks == 1
        (place / "strange").touch()
        look_at_room(store, place, losses)
        assert losses.leaks == 2
