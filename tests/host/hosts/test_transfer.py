# SPDX-License-Identifier: Apache-2.0
"""Prefixes that go from one host's store to another's: whole, checked, by who has the key."""

import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from replicas import HTTP

from hillinfer.store.keys import group_keys, root_key
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import check, namespace, prompt, put
from hillinfer_hosts.agent import Agent, fetch_body
from hillinfer_hosts.running import in_background
from hillinfer_hosts.transfer import HostReader, TransferError, Wanted, bring

KEY = "a key that hosts share"
SPACE = namespace()


@pytest.fixture
def stores(tmp_path):
    made = []
    for name in ("here", "there"):
        Store.create(tmp_path / name, 256 << 20)
        made.append(Store(tmp_path / name))
    yield made
    for one in made:
        one.close()


@contextmanager
def serving(store, key=KEY):
    with in_background(lambda _: Agent(store, key).application()) as url:
        yield url


@contextmanager
def reading(url, key=KEY, seconds=20.0):
    reader = HostReader(url, key, time.monotonic() + seconds)
    yield reader
    reader.close()


def wanted(ids, salt=b""):
    return Wanted(SPACE.digest, tuple(ids), salt)


@pytest.mark.parametrize("tokens", [64, 1000, 1024, 3000])
def test_a_prefix_comes_whole(stores, tokens):
    here, there = stores
    ids = prompt(1, tokens)
    put(there, SPACE, ids)
    with serving(there) as url, reading(url) as reader:
        brought = bring(here, reader, wanted(ids))
    assert (brought.tokens, brought.failure) == (tokens // 64 * 64, "")
    assert brought.new_tokens == brought.tokens
    # Rows and shadows are those that were computed, which `check` compares.
    assert check(here, SPACE, ids) == tokens // 64 * 64
    assert check(here, SPACE, prompt(2, tokens)) == 0
    with here.find(SPACE, ids) as own, there.find(SPACE, ids) as other:
        for mine, theirs in zip(own.chunks, other.chunks, strict=True):
            assert mine.sheet.header.has_shadow == theirs.sheet.header.has_shadow
            assert mine.sheet.header.cost == pytest.approx(theirs.sheet.header.cost)


def test_what_is_here_already_is_not_read_again(stores):
    here, there = stores
    ids = prompt(1, 4000)
    put(there, SPACE, ids)
    put(here, SPACE, ids[:2048])
    with serving(there) as url:
        with reading(url) as reader:
            brought = bring(here, reader, wanted(ids))
        with reading(url) as reader:
            again = bring(here, reader, wanted(ids))
    assert (brought.tokens, brought.new_tokens) == (3968, 3968 - 2048)
    whole = 3968 * SPACE.layers * SPACE.row_bytes
    assert 0.4 * whole < brought.byte_count < 0.75 * whole
    assert (again.tokens, again.new_tokens, again.byte_count) == (3968, 0, 0)
    assert check(here, SPACE, ids) == 3968


def test_a_tenant_brings_its_own_alone(stores):
    here, there = stores
    ids = prompt(1, 1024)
    put(there, SPACE, ids, salt=b"one")
    with serving(there) as url:
        with reading(url) as reader:
            brought = bring(here, reader, wanted(ids, b"two"))
            assert brought.new_tokens == 0
            assert "404" in brought.failure
        with reading(url) as reader:
            assert bring(here, reader, wanted(ids, b"one")).new_tokens == 1024


def test_damaged_rows_do_not_arrive(stores, tmp_path):
    here, there = stores
    ids = prompt(1, 2048)
    put(there, SPACE, ids)
    with there.find(SPACE, ids) as found:
        chunk = found.chunks[1]
        at = chunk.record.span.offset + chunk.shape.rows_at(2, 5) + 7
    with (tmp_path / "there" / "pool-0.kv").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with serving(there) as url, reading(url) as reader:
        brought = bring(here, reader, wanted(ids))
    assert brought.tokens == 1024
    assert "rows of layer 2 came as others" in brought.failure
    assert check(here, SPACE, ids) == 1024
    # Nothing is left that would be in the way of who computes it now.
    put(here, SPACE, ids)
    assert check(here, SPACE, ids) == 2048


def test_a_host_that_is_slow_or_gone_is_given_up(stores):
    here, there = stores
    ids = prompt(1, 1024)
    put(there, SPACE, ids)
    with serving(there) as url:
        with reading(url, seconds=0.0) as reader, pytest.raises(TransferError, match="too long"):
            bring(here, reader, wanted(ids))
        gone = url
    with reading(gone) as reader, pytest.raises(TransferError, match="does not answer"):
        bring(here, reader, wanted(ids))
    assert check(here, SPACE, ids) == 0


def get(url, path, key=KEY, **headers):
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return HTTP.get(url + path, headers=headers)


def test_an_agent_gives_nothing_without_the_key(stores):
    _, there = stores
    ids = prompt(1, 1024)
    put(there, SPACE, ids)
    name = group_keys(root_key(SPACE.digest), ids)[-1].hex()
    first = {"Range": "bytes=0-4095"}
    with serving(there) as url:
        assert get(url, f"/extents/{name}", **first).status_code == 206
        for key in (None, "a", "another key of hosts", KEY[:-1]):
            for path in (f"/extents/{name}", f"/namespaces/{SPACE.digest.hex()}"):
                assert get(url, path, key, **first).status_code == 401
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            asked = HTTP.post(f"{url}/fetch", json={}, headers=headers)
            assert asked.status_code == 401
        assert get(url, "/health", None).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "%2e%2e%2fstore.json", "..%2f..%2fstore.json", "0" * 63, "0" * 65,
     "G" * 64, "0" * 63 + "%00", "", "pool-0.kv"],
)  # fmt: skip
def test_a_name_that_is_no_key_leads_nowhere(stores, name):
    with serving(stores[1]) as url:
        for where in ("extents", "namespaces"):
            answer = get(url, f"/{where}/{name}", Range="bytes=0-4095")
            assert answer.status_code == 404
            assert str(stores[1].places.directory) not in answer.text


@pytest.mark.parametrize(
    "wrong",
    ["", "bytes=0-", "bytes=-5", "bytes=5-4", "bytes=0-99999999999", "bytes=0-1,2-3", "rows=0-1",
     "bytes=0-999999999999999999999"],
)  # fmt: skip
def test_a_range_that_is_none_is_refused(stores, wrong):
    _, there = stores
    ids = prompt(1, 1024)
    put(there, SPACE, ids)
    name = group_keys(root_key(SPACE.digest), ids)[-1].hex()
    with serving(there) as url:
        headers = {"Range": wrong} if wrong else {}
        assert get(url, f"/extents/{name}", **headers).status_code == 416
        odd = get(url, f"/extents/{name}", Range="bytes=5-11")
        assert odd.status_code == 206
        assert odd.content == get(url, f"/extents/{name}", Range="bytes=0-4095").content[5:12]
        assert odd.headers["Content-Range"].startswith("bytes 5-11/")


def test_a_host_is_told_to_bring_a_prefix(stores):
    here, there = stores
    ids = prompt(1, 2000)
    put(there, SPACE, ids)
    headers = {"Authorization": f"Bearer {KEY}"}
    with serving(there) as source, serving(here) as url:
        body = fetch_body(source, wanted(ids), 20.0)
        told = HTTP.post(f"{url}/fetch", json=body, headers=headers).json()
        assert (told["tokens"], told["new_tokens"], told["failure"]) == (1984, 1984, "")
        for name, wrong in (
            ("source", "file:///etc/passwd"),
            ("namespace", "00"),
            ("ids", [-1]),
            ("ids", "no"),
            ("salt", 3),
            ("seconds", "soon"),
        ):
            refused = HTTP.post(f"{url}/fetch", json=body | {name: wrong}, headers=headers)
            assert refused.status_code == 400
        lost = body | {"source": "http://127.0.0.1:9", "ids": prompt(5, 640)}
        told = HTTP.post(f"{url}/fetch", json=lost, headers=headers).json()
        assert told["new_tokens"] == 0
        assert "does not answer" in told["failure"]
    assert check(here, SPACE, ids) == 1984


class Trickle(BaseHTTPRequestHandler):
    """Another host that sends what it likes: without end, or a byte or a header at a time."""

    sent = 0
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    pause = 0.0
    part = b"0" * 65536

    def log_message(self, *_):
        pass

    def do_GET(self):
        own = type(self)
        self.wfile.write(own.head)
        with suppress(OSError):
            while own.sent < 256 << 20:
                self.wfile.write(own.part)
                own.sent += len(own.part)
                time.sleep(own.pause)

    def do_POST(self):
        self.do_GET()


@contextmanager
def trickling(**how):
    """Serve a host that never ends; yield its class and its URL."""
    own = type("Own", (Trickle,), how)
    server = ThreadingHTTPServer(("127.0.0.1", 0), own)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield own, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# httpx takes 100 KiB of headers: 25 seconds of these.
HEADERS = {"head": b"HTTP/1.1 200 OK\r\n", "pause": 0.25, "part": b"X-One: %s\r\n" % (b"1" * 1000)}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "more than was asked"),
        ({"pause": 0.05, "part": b"0"}, "too long"),
        (HEADERS, "too long"),
    ],
    ids=["body", "bytes", "headers"],
)
def test_a_host_that_never_ends_is_given_up_in_time(stores, how, said):
    with trickling(**how) as (own, url):
        began = time.monotonic()
        with reading(url, seconds=0.5) as reader, pytest.raises(TransferError, match=said):
            bring(stores[0], reader, wanted(prompt(1, 1024)))
        assert time.monotonic() - began < 15.0
        # What is more is left where it is, a few buffers of sockets beside it.
        assert own.sent < 32 << 20
