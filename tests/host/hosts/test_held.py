# SPDX-License-Identifier: Apache-2.0
"""What an agent says of its store: all of it, then what changed, also where something went."""

import threading

import pytest
from replicas import KEY, placed, wait_until

from hillinfer.errors import HillInferError
from hillinfer.secrecy.key_sources import key_source
from hillinfer.store.keys import group_keys, root_key
from hillinfer.store.maintenance import chains
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import namespace, prompt, put
from hillinfer_hosts.announcing import Announcer, RouterDirectory
from hillinfer_hosts.directory import Change, EmbeddedDirectory, Host, HostsError
from hillinfer_hosts.held import HeldPrefixes

SPACE = namespace(shadow_bytes=0)


@pytest.fixture
def store(tmp_path):
    Store.create(tmp_path / "store", 256 << 20)
    with Store(tmp_path / "store") as opened:
        yield opened


def keys_of(ids):
    return [key[:16] for key in group_keys(root_key(SPACE.digest), ids)]


def test_all_is_said_once_and_then_what_changed(store):
    held = HeldPrefixes(store)
    assert held.everything().held == []
    first, second = prompt(1, 3000), prompt(2, 100)
    put(store, SPACE, first)
    with Store(store.places.directory) as other:
        put(other, SPACE, second)
    change = held.change()
    assert change.held == sorted(keys_of(first) + keys_of(second))
    assert not change.gone
    assert not change.is_whole
    assert held.change().held == ()
    assert held.everything().held == change.held
    assert held.namespaces() == (SPACE.digest,)


def test_what_went_is_said_but_not_what_others_have_too(store):
    held = HeldPrefixes(store)
    long, beside = prompt(1, 3000), prompt(1, 1100) + prompt(2, 500)
    put(store, SPACE, long)
    put(store, SPACE, beside)
    everything = held.everything()
    gone = next(one for one in chains(store.database) if one.tokens == len(long) // 64 * 64)
    store.remove(gone.name)
    change = held.change()
    assert set(change.gone) == set(keys_of(long)) - set(keys_of(beside))
    assert not change.held
    assert set(everything.held) - set(change.gone) == set(keys_of(beside))


def test_a_number_that_is_given_again_is_another_chunk(store):
    held = HeldPrefixes(store)
    first, second = prompt(1, 640), prompt(2, 640)
    put(store, SPACE, first)
    held.everything()
    (numbers,) = store.database.rows("SELECT id FROM chunk")
    store.remove(next(iter(chains(store.database))).name)
    put(store, SPACE, second)
    assert [numbers] == store.database.rows("SELECT id FROM chunk")
    change = held.change()
    assert set(change.held) == set(keys_of(second))
    assert set(change.gone) == set(keys_of(first))


def test_an_encrypted_store_is_refused(tmp_path):
    pytest.importorskip("cryptography")
    file = tmp_path / "key"
    file.write_bytes(bytes(range(32)))
    file.chmod(0o600)
    key = key_source(file, None, None)
    Store.create(tmp_path / "sealed", 64 << 20, key=key)
    with Store(tmp_path / "sealed", key=key) as store, pytest.raises(HostsError, match="encrypted"):
        HeldPrefixes(store)


class Told(EmbeddedDirectory):
    """A directory that says when it was told something, and fails when it is to."""

    def __init__(self):
        super().__init__()
        self.changes, self.fails = [], False
        self.came = threading.Condition()

    def announce(self, host, change):
        if self.fails:
            raise HillInferError("away")
        is_known = super().announce(host, change)
        with self.came:
            self.changes.append(change)
            self.came.notify_all()
        return is_known

    def wait_for(self, what):
        with self.came:
            assert self.came.wait_for(lambda: what(self), 10)


def test_an_announcer_says_everything_where_it_is_unknown(store):
    directory, lines = Told(), []
    ids = prompt(1, 3000)
    keys = group_keys(root_key(SPACE.digest), ids)
    put(store, SPACE, ids)
    host = Host("a", "http://a", "", "1")
    announcer = Announcer(
        host, HeldPrefixes(store), directory, 0.01, say=lines.append, beat_seconds=0.05
    )
    try:
        directory.wait_for(lambda own: own.longest(keys) == {"a": len(keys)})
        assert directory.hosts()[0].namespaces == (SPACE.digest,)
        directory.forget("a")
        directory.wait_for(lambda own: own.longest(keys) == {"a": len(keys)})
        directory.fails = True
        wait_until(lambda: "away" in lines)
        directory.forget("a")
        directory.fails = False
        directory.wait_for(lambda own: own.longest(keys) == {"a": len(keys)})
    finally:
        announcer.close()
    assert lines.count("away") == 1
    count = len(directory.changes)
    put(store, SPACE, prompt(2, 640))
    assert len(directory.changes) == count


def test_who_does_not_answer_says_nothing(store):
    directory, asked = Told(), threading.Event()

    def is_there():
        asked.set()
        return False

    host = Host("a", "http://a", "", "1")
    announcer = Announcer(host, HeldPrefixes(store), directory, 0.01, is_there)
    assert asked.wait(10)
    announcer.close()
    assert directory.hosts() == []


def test_an_announcer_outlives_whatever_a_directory_does(store):
    directory, lines = Told(), []
    announce, fails = directory.announce, [True]

    def odd(host, change):
        if fails:
            raise KeyError("a fault of its own")
        return announce(host, change)

    directory.announce = odd
    host = Host("a", "http://a", "", "1")
    announcer = Announcer(host, HeldPrefixes(store), directory, 0.01, say=lines.append)
    try:
        wait_until(lambda: any("KeyError" in one for one in lines))
        fails.clear()
        directory.wait_for(lambda own: [one.name for one in own.hosts()] == ["a"])
    finally:
        announcer.close()


@pytest.mark.parametrize("most", [9, 1000])
def test_a_large_announcement_comes_in_parts(most):
    keys = keys_of(prompt(1, 3000))
    with placed("") as place:
        directory = RouterDirectory(place.url, KEY, most)
        host = Host("a", "http://10.0.0.1:8000", "", "1", (SPACE.digest,))
        assert directory.announce(host, Change(keys, (), True))
        assert place.directory.longest(keys) == {"a": len(keys)}
        assert directory.announce(host, Change((), keys[20:]))
        assert place.directory.longest(keys) == {"a": 20}
        assert directory.announce(host, Change(keys[:3], (), True))
        assert place.directory.longest(keys) == {"a": 3}
        directory.close()


@pytest.mark.parametrize("wrong", ["router:8100", "ftp://router", "http://", "http://a:port", ""])
def test_a_directory_that_is_nowhere_is_refused_at_the_start(wrong):
    with pytest.raises(HostsError, match="no URL"):
        RouterDirectory(wrong)
