# SPDX-License-Identifier: Apache-2.0
"""Which host holds the longest prefix: the embedded directory and the one in Redis, alike."""

import os
import sqlite3
import time as clock

import pytest

from hillinfer.store.keys import group_keys, root_key
from hillinfer_hosts.announcing import packed, unpacked
from hillinfer_hosts.choice import make_policy
from hillinfer_hosts.directory import Change, EmbeddedDirectory, Host, HostsError
from hillinfer_hosts.fleet import Fleet
from hillinfer_hosts.prompts import Chains

SPACE = bytes(range(32))
IDS = [7 * at % 1000 for at in range(5000)]


def keys_of(ids, salt=b""):
    return group_keys(root_key(SPACE, salt), ids)


KEYS = keys_of(IDS)


class Time:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def embedded(time, tmp_path):
    return EmbeddedDirectory(silent_seconds=10, clock=time)


def in_a_file(time, tmp_path):
    return EmbeddedDirectory(str(tmp_path / "directory.sqlite"), 10, time)


def in_redis(time, tmp_path):
    return redis_directory(60)


def redis_directory(seconds):
    """One in the Redis of HILLINFER_REDIS, which is emptied; else in one of Python."""
    client = None
    url = os.environ.get("HILLINFER_REDIS", "")
    if url:
        pytest.importorskip("redis").Redis.from_url(url).flushdb()
    else:
        client = pytest.importorskip("fakeredis").FakeRedis()
    from hillinfer_hosts.redis_directory import RedisDirectory

    return RedisDirectory(url, seconds, client)


@pytest.fixture
def time():
    return Time()


@pytest.fixture(params=[embedded, in_a_file, in_redis])
def directory(request, time, tmp_path):
    made = request.param(time, tmp_path)
    yield made
    made.close()


def host(name, session="1"):
    return Host(name, f"http://{name}:8000", f"http://{name}:8200", session, (SPACE,))


def says(directory, name, keys, session="1", **more):
    return directory.announce(host(name, session), Change(keys, **({"is_whole": True} | more)))


@pytest.mark.parametrize("groups", [1, 3, 15, 16, 17, 32, 40, 78])
def test_the_longest_prefix_is_found(directory, groups):
    assert directory.longest(KEYS) == {}
    says(directory, "a", KEYS[:groups])
    assert directory.longest(KEYS) == {"a": groups}
    assert directory.longest(KEYS[:2]) == {"a": min(groups, 2)}
    assert directory.longest(keys_of([1, *IDS])) == {}
    assert directory.longest(keys_of(IDS, b"another tenant")) == {}
    assert directory.longest([]) == {}


def test_hosts_are_told_apart(directory):
    says(directory, "a", KEYS[:5])
    says(directory, "b", KEYS[:40])
    says(directory, "c", keys_of(IDS[::-1]))
    assert directory.longest(KEYS) == {"a": 5, "b": 40}
    assert [one.name for one in directory.hosts()] == ["a", "b", "c"]
    assert directory.hosts()[0] == host("a")


def test_differences_follow_each_other(directory):
    says(directory, "a", KEYS[:20])
    assert says(directory, "a", KEYS[20:50], is_whole=False)
    assert directory.longest(KEYS) == {"a": 50}
    assert directory.announce(host("a"), Change((), KEYS[30:50]))
    assert directory.longest(KEYS) == {"a": 30}
    assert directory.announce(host("a"), Change())
    says(directory, "a", KEYS[:3])
    assert directory.longest(KEYS) == {"a": 3}


def test_differences_of_who_is_unknown_or_began_anew_are_not_taken(directory):
    assert not says(directory, "a", KEYS, is_whole=False)
    assert directory.hosts() == []
    says(directory, "a", KEYS)
    assert not says(directory, "a", KEYS[:3], session="2", is_whole=False)
    assert says(directory, "a", KEYS[:3], session="2")
    assert directory.longest(KEYS) == {"a": 3}


def test_a_dead_host_is_forgotten_and_may_come_back(directory):
    says(directory, "a", KEYS)
    says(directory, "b", KEYS[:2])
    directory.forget("a")
    directory.forget("nobody")
    assert directory.longest(KEYS) == {"b": 2}
    assert [one.name for one in directory.hosts()] == ["b"]
    assert not directory.announce(host("a"), Change())
    says(directory, "a", KEYS)
    assert directory.longest(KEYS)["a"] == len(KEYS)


def test_a_silent_host_is_not_there(time, tmp_path):
    directory = embedded(time, tmp_path)
    says(directory, "a", KEYS)
    time.now = 9.0
    assert directory.announce(host("a"), Change())
    time.now = 18.0
    assert directory.longest(KEYS) == {"a": len(KEYS)}
    time.now = 20.0
    assert directory.longest(KEYS) == {}
    assert directory.hosts() == []
    # It only said nothing: a beat is enough.
    assert directory.announce(host("a"), Change())
    assert directory.longest(KEYS) == {"a": len(KEYS)}


def test_redis_lets_go_of_a_silent_host():
    directory = redis_directory(0.2)
    says(directory, "a", KEYS)
    assert directory.longest(KEYS) == {"a": len(KEYS)}
    clock.sleep(0.4)
    assert directory.longest(KEYS) == {}
    assert directory.hosts() == []
    assert not directory.announce(host("a"), Change())
    directory.close()


def test_a_redis_that_is_away_is_told_in_a_line():
    pytest.importorskip("redis")
    from hillinfer_hosts.redis_directory import RedisDirectory

    directory = RedisDirectory("redis://127.0.0.1:9")
    with pytest.raises(HostsError, match="does not answer"):
        directory.longest(KEYS)


def test_a_directory_in_a_file_is_there_after_a_restart(time, tmp_path):
    first = in_a_file(time, tmp_path)
    says(first, "a", KEYS)
    first.close()
    again = in_a_file(time, tmp_path)
    assert again.longest(KEYS) == {"a": len(KEYS)}
    again.close()
    with pytest.raises(HostsError, match="cannot be used"):
        EmbeddedDirectory(str(tmp_path / "none" / "directory"))


def test_a_directory_that_breaks_costs_no_router(tmp_path):
    file = tmp_path / "directory.sqlite"
    directory = EmbeddedDirectory(str(file), 10, lambda: 0.0)
    says(directory, "a", KEYS)
    fleet = Fleet(directory, make_policy("prefix"))
    chains = Chains.of(IDS, b"", [SPACE])
    assert fleet.held(chains) == {"a": len(KEYS)}
    with sqlite3.connect(file) as other:
        other.executescript("DROP TABLE held; DROP TABLE host")
    other.close()
    for act in (
        directory.hosts,
        directory.count,
        lambda: directory.longest(KEYS),
        lambda: directory.forget("a"),
        lambda: says(directory, "a", KEYS),
    ):
        with pytest.raises(HostsError, match="cannot be used"):
            act()
    # It knows who was there last, and sends requests to the idlest.
    fleet.lost(host("b"))
    assert fleet.held(chains) == {}
    directory.close()
    with pytest.raises(HostsError, match="cannot be used"):
        directory.hosts()


def test_who_may_write_to_redis_and_has_no_key_leads_nobody_anywhere():
    client = pytest.importorskip("fakeredis").FakeRedis()
    from hillinfer_hosts.redis_directory import RedisDirectory

    signed = RedisDirectory("", 60, client, "what the hosts share")
    stranger = RedisDirectory("", 60, client)
    entry = "hillinfer:host:a"
    told = [("replica", "http://attacker.example"), ("agent", "http://attacker.example")]
    told += [("namespaces", bytes(32)), ("signature", bytes(32))]
    for name, wrong in told:
        assert says(signed, "a", KEYS)
        assert signed.hosts() == [host("a")]
        client.hset(entry, name, wrong)
        assert signed.hosts() == []
        # Without a key everybody is believed.
        assert len(stranger.hosts()) == 1
    says(signed, "a", KEYS)
    # Neither one of his own, nor another's words under another name.
    says(stranger, "b", KEYS)
    client.hset("hillinfer:host:c", mapping=client.hgetall(entry))
    client.sadd("hillinfer:hosts", "c")
    assert signed.hosts() == [host("a")]
    assert len(stranger.hosts()) == 3
    assert RedisDirectory("", 60, client, "another key of hosts").hosts() == []


def test_what_a_host_said_is_not_repeated_for_ever(time):
    client = pytest.importorskip("fakeredis").FakeRedis()
    from hillinfer_hosts.redis_directory import RedisDirectory

    time.now = 1000.0
    entry, key, said = "hillinfer:host:a", "what the hosts share", []
    directory = RedisDirectory("", 60, client, key, time, said.append)
    says(directory, "a", KEYS)
    old = client.hgetall(entry)
    for time.now, is_there in ((1059.0, True), (1061.0, False), (939.0, False), (941.0, True)):
        client.hset(entry, mapping=old)
        assert bool(directory.hosts()) == is_there, time.now
    assert len(said) == 1
    assert "repeats it" in said[0]
    # Another time is another signature.
    time.now = 1061.0
    for later in (b"1061.000", b"nan", b"", b"\xff"):
        client.hset(entry, mapping=old | {b"said": later})
        assert directory.hosts() == []
    # The host itself is believed at once.
    assert directory.announce(host("a"), Change())
    assert directory.hosts() == [host("a")]


def test_a_host_that_is_not_believed_is_told_once():
    client = pytest.importorskip("fakeredis").FakeRedis()
    from hillinfer_hosts.redis_directory import RedisDirectory

    said = []
    directory = RedisDirectory("", 60, client, "what the hosts share", say=said.append)
    says(directory, "a", KEYS)
    assert directory.hosts() == [host("a")]
    assert said == []
    for name in "bc":
        says(RedisDirectory("", 60, client), name, KEYS)
    client.sadd("hillinfer:hosts", b"\xff")
    for _ in range(3):
        assert directory.hosts() == [host("a")]
    assert len(said) == 2
    assert all(repr(name) in line for name, line in zip("bc", said, strict=True))
    assert all("not signed" in line for line in said)


def test_namespaces_of_all_hosts_have_their_turn():
    many = tuple(bytes([at]) * 32 for at in range(40))
    hosts = [Host("a", "http://a", namespaces=many), Host("b", "http://b", namespaces=(SPACE,))]
    named = Fleet(EmbeddedDirectory(), make_policy("prefix")).namespaces(hosts)
    assert len(named) == 16
    assert SPACE in named
    # Of each the latest ones.
    assert many[-1] in named
    assert many[0] not in named


def test_an_announcement_comes_as_it_was_sent():
    change = Change([key[:16] for key in KEYS[:3]], [KEYS[4][:16]], True)
    assert unpacked(packed(host("a"), change)) == (host("a"), change)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("host", None),
        ("host", {"name": ""}),
        ("host", host("").told()),
        ("host", host("a").told() | {"namespaces": ["00"]}),
        ("host", host("a").told() | {"namespaces": 3}),
        ("host", host("a").told() | {"name": "a\nb"}),
        ("host", host("a").told() | {"replica": ""}),
        ("host", host("a").told() | {"replica": "file:///etc/passwd"}),
        ("host", host("a").told() | {"agent": "http://a:99999999"}),
        ("held", "no base64!"),
        ("held", "AAAA"),
        ("gone", 3),
        ("is_whole", ...),
    ],
)
def test_what_is_no_announcement_is_refused(name, wrong):
    told = packed(host("a"), Change(KEYS[:2]))
    unpacked(dict(told))
    if wrong is ...:
        del told[name]
    else:
        told[name] = wrong
    with pytest.raises(HostsError, match="that is no"):
        unpacked(told)
