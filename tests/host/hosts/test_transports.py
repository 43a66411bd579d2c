# SPDX-License-Identifier: Apache-2.0
"""Rows that another transport puts into memory: whole, checked, and by HTTP where that fails."""

import ctypes
import importlib.util
import sys
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
from replicas import HTTP
from test_transfer import HEADERS, trickling

from hillinfer.drive.files import aligned_buffer
from hillinfer.store.keys import group_keys, root_key
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put
from hillinfer_hosts.agent import Agent, fetch_body
from hillinfer_hosts.directory import HostsError
from hillinfer_hosts.running import in_background
from hillinfer_hosts.transfer import INTO_HEADER, HostReader, TransferError, Wanted, bring
from hillinfer_hosts.transports import (
    DirectMemory,
    NixlTransport,
    TransportError,
    Transporting,
    opened_transport,
)

KEY = "a key that hosts share"
SPACE = namespace()
IDS = tuple(prompt(1, 3000))
WANTED = Wanted(SPACE.digest, IDS)
HAS_NIXL = importlib.util.find_spec("nixl") is not None
with_nixl = pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed: 220 MB")


class Copying:
    """Copies within this process, where both hosts of a test are."""

    name = "nixl"
    introduction = b"here"

    def __init__(self, wrong=0, error=None):
        self.wrong, self.error = wrong, error
        self.written, self.met = 0, []

    def register(self, memory):
        pass

    def meet(self, introduction):
        self.met.append(introduction)
        return introduction.decode()

    def part(self, peer):
        self.met.remove(peer.encode())

    def write(self, peer, memory, address, seconds):
        if self.error is not None:
            raise self.error
        ctypes.memmove(address, memory.ctypes.data, memory.nbytes)
        there = (ctypes.c_uint8 * memory.nbytes).from_address(address)
        there[memory.nbytes // 2] ^= self.wrong
        self.written += memory.nbytes


def make(which):
    return NixlTransport() if which == "nixl" else Copying()


@pytest.fixture
def stores(tmp_path):
    made = []
    for name in ("here", "there"):
        Store.create(tmp_path / name, 256 << 20)
        made.append(Store(tmp_path / name))
    put(made[1], SPACE, IDS)
    yield made
    for one in made:
        one.close()


@contextmanager
def serving(store, transport):
    agent = Agent(store, KEY, transport=transport)
    with in_background(lambda _: agent.application()) as url:
        yield url


def brought_from(url, store, transport):
    direct = None if transport is None else DirectMemory(transport, 2, (16 << 20) + 8192)
    with closing(HostReader(url, KEY, time.monotonic() + 20.0, direct)) as reader:
        return bring(store, reader, WANTED)


@pytest.mark.parametrize("which", ["copies", pytest.param("nixl", marks=with_nixl)])
def test_rows_come_past_http(stores, which):
    here, there = stores
    with serving(there, make(which)) as url:
        brought = brought_from(url, here, make(which))
    assert (brought.tokens, brought.failure) == (2944, "")
    assert brought.direct_bytes == brought.byte_count > 2944 * SPACE.layers * SPACE.row_bytes
    assert check(here, SPACE, IDS) == 2944


def test_an_agent_that_fetches_says_what_came_past_http(stores):
    here, there = stores
    headers = {"Authorization": f"Bearer {KEY}"}
    with serving(there, Copying()) as source, serving(here, Copying()) as url:
        body = fetch_body(source, WANTED, 20.0)
        told = HTTP.post(f"{url}/fetch", json=body, headers=headers).json()
    assert (told["tokens"], told["failure"]) == (2944, "")
    assert told["direct_bytes"] == told["bytes"]
    assert check(here, SPACE, IDS) == 2944


@pytest.mark.parametrize("how", [HEADERS, {"part": b"0", "pause": 0.05}], ids=["headers", "bytes"])
def test_an_introduction_takes_no_longer_than_all_may_take(how):
    direct = DirectMemory(Copying(), 2, 1 << 20)
    began = time.monotonic()
    with (
        trickling(**how) as (_, url),
        closing(HostReader(url, KEY, began + 0.5, direct)) as reader,
        pytest.raises(TransferError, match="too long"),
    ):
        reader.read(bytes(32), 0, 4096, np.zeros(4096, np.uint8))
    assert time.monotonic() - began < 15.0


def test_a_bit_that_a_transport_flips_is_noticed(stores):
    here, there = stores
    with serving(there, Copying(wrong=1)) as url:
        brought = brought_from(url, here, Copying())
    assert brought.tokens == 0
    assert brought.failure
    assert check(here, SPACE, IDS) == 0


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (None, Copying()),
        (Copying(), None),
        (Copying(), Copying(error=TransportError("no way there"))),
    ],
)
def test_what_a_transport_does_not_bring_comes_by_http(stores, mine, theirs):
    here, there = stores
    with serving(there, theirs) as url:
        brought = brought_from(url, here, mine)
    assert (brought.tokens, brought.failure, brought.direct_bytes) == (2944, "", 0)
    assert check(here, SPACE, IDS) == 2944


def test_a_transport_takes_the_key_and_an_introduction(stores):
    copying = Copying()
    headers = {"Authorization": f"Bearer {KEY}"}
    name = group_keys(root_key(SPACE.digest), IDS)[15].hex()
    with serving(stores[1], copying) as url:
        hello = {"introduction": "aGVyZQ=="}
        assert HTTP.post(f"{url}/transports/nixl", json=hello).status_code == 401
        for where, body, status in (
            ("nixl", hello, 200),
            ("other", hello, 404),
            ("nixl", {"introduction": "?"}, 400),
            ("nixl", {"introduction": 3}, 400),
            ("nixl", [], 400),
        ):
            asked = HTTP.post(f"{url}/transports/{where}", json=body, headers=headers)
            assert asked.status_code == status
        # Who was not met, and what is no address, gets bytes and no writing.
        for into in ("nobody 4096", "here", "here x", "here -1"):
            given = headers | {"Range": "bytes=0-4095", INTO_HEADER: into}
            answer = HTTP.get(f"{url}/extents/{name}", headers=given)
            assert (answer.status_code, len(answer.content)) == (206, 4096)
    assert copying.written == 0


def test_memory_is_given_to_one_at_a_time_and_hosts_are_forgotten():
    copying = Copying()
    direct = DirectMemory(copying, 1, 8192)
    with direct.taken(4096) as piece:
        assert piece.nbytes == 4096
        with direct.taken(1) as other:
            assert other is None
    with direct.taken(8193) as piece:
        assert piece is None
    first = direct.meet(b"0")
    assert direct.meet(b"0") == first
    for number in range(1, 65):
        direct.meet(str(number).encode())
    assert len(copying.met) == 64
    with pytest.raises(TransportError, match="nobody"):
        direct.write(first, np.zeros(8, np.uint8), 0, 1.0)


def test_http_needs_no_transport_and_nixl_says_what_it_lacks(monkeypatch):
    assert opened_transport(Transporting.HTTP) is None
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(HostsError, match="--transport http"):
        opened_transport(Transporting.NIXL)


@with_nixl
def test_nixl_writes_to_registered_memory_alone():
    one, other = NixlTransport(), NixlTransport()
    mine, theirs = (aligned_buffer(1 << 20)[: 1 << 20] for _ in range(2))
    mine[:], theirs[:] = np.arange(1 << 20) % 251, 0
    one.register(mine)
    other.register(theirs)
    peer = one.meet(other.introduction)
    one.write(peer, mine[4096:8192], theirs.ctypes.data + 8192, 5.0)
    assert np.array_equal(theirs[8192:12288], mine[4096:8192])
    assert not theirs[12288:].any()
    with pytest.raises(TransportError):
        one.write(peer, mine[:4096], theirs.ctypes.data + theirs.nbytes, 5.0)
    with pytest.raises(TransportError):
        one.meet(b"nobody")
