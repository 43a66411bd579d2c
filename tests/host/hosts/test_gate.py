# SPDX-License-Identifier: Apache-2.0
"""What a router and an agent let in: no page of other places, no strangers, nothing but JSON."""

import json
from contextlib import contextmanager

import pytest
from replicas import HTTP, SPACE, placed

from hillinfer.errors import HillInferError
from hillinfer.store.store import Store
from hillinfer_hosts import cli
from hillinfer_hosts.agent import Agent, fetch_body
from hillinfer_hosts.announcing import packed
from hillinfer_hosts.directory import Change, Host
from hillinfer_hosts.running import in_background, read_key
from hillinfer_hosts.transfer import Wanted

TEXT = "the cat sat on the mat " * 20
NEW = packed(Host("new", "http://10.0.0.9:8000", "", "1", (SPACE,)), Change(is_whole=True))
# What a page of another place sends through a browser of this machine.
PAGES = [
    ({"Origin": "http://attacker.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Host": "attacker.example"}, 403),
    ({"Host": "attacker.example:8100", "Origin": "http://attacker.example:8100"}, 403),
    ({"Content-Type": "text/plain"}, 415),
]


def named(place):
    return [one.name for one in place.directory.hosts()]


@pytest.mark.parametrize(("headers", "status"), PAGES)
def test_no_page_announces_a_host_to_a_router_without_a_key(headers, status):
    with placed("a", key="") as place:
        url = f"{place.url}/hosts/announce"
        assert HTTP.post(url, json=NEW, headers=headers).status_code == status
        assert named(place) == ["a"]
        # A host of this machine does.
        assert HTTP.post(url, json=NEW).status_code == 200
        assert named(place) == ["a", "new"]


@pytest.mark.parametrize("headers", [headers for headers, status in PAGES if status == 403])
def test_no_page_asks_a_replica_behind_a_router(headers):
    with placed("a") as place:
        assert place.ask(TEXT, headers=headers).status_code == 403
        assert place.counted() == {"a": 0}
        # A page of the router itself may; the replica, which has another address, sees no origin.
        assert place.ask(TEXT, headers={"Origin": place.url}).status_code == 200
        assert "origin" not in place.replicas["a"].asked[0][2]


@contextmanager
def agent(tmp_path):
    Store.create(tmp_path / "store", 64 << 20)
    with (
        Store(tmp_path / "store") as store,
        in_background(lambda _: Agent(store).application()) as url,
    ):
        yield url


def test_no_page_sends_an_agent_anywhere(tmp_path):
    body = fetch_body("http://127.0.0.1:9", Wanted(SPACE, tuple(range(64))), 1.0)
    with agent(tmp_path) as url:
        for headers, status in PAGES:
            assert HTTP.post(f"{url}/fetch", json=body, headers=headers).status_code == status
        assert "does not answer" in HTTP.post(f"{url}/fetch", json=body).json()["failure"]


def test_wrong_fetches_take_no_room(tmp_path):
    body = fetch_body("http://127.0.0.1:9", Wanted(SPACE, tuple(range(64))), 1.0)
    wrong = [{"source": f"http://127.0.0.1:9{end}"} for end in ("9" * 9, "\x00", "?a", "#a")]
    wrong += [{"source": "http://"}, {"seconds": float("nan")}, {"seconds": -1}]
    with agent(tmp_path) as url:
        for one in wrong:
            told = HTTP.post(
                f"{url}/fetch",
                content=json.dumps(body | one),
                headers={"Content-Type": "application/json"},
            )
            assert told.status_code == 400, one
        assert HTTP.post(f"{url}/fetch", json=body).status_code == 200


def test_an_agent_that_nobody_could_reach_is_refused(tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123\n")
    key.chmod(0o600)
    asked = {"store": tmp_path / "none", "replica": "http://10.0.0.7:8000"}
    asked |= {"directory": "http://10.0.0.6:8100", "key_file": key}
    with pytest.raises(HillInferError, match="--url"):
        cli.agent(**asked, host="0.0.0.0")
    for name, wrong in (("replica", "10.0.0.7:8000"), ("url", "http://10.0.0.7:port")):
        with pytest.raises(HillInferError, match=f"--{name} .* is no URL"):
            cli.agent(**(asked | {name: wrong}))
    # With them it goes on, to the store, which is none.
    with pytest.raises(HillInferError, match="none"):
        cli.agent(**asked, host="0.0.0.0", url="http://10.0.0.7:8200")


def is_read(key, *user):
    try:
        return bool(read_key(key, "10.0.0.7", *user))
    except HillInferError:
        return False


def test_a_key_that_others_may_read_is_refused(tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123\nmore\n")
    for mode in (0o644, 0o640, 0o604, 0o620, 0o601):
        key.chmod(mode)
        with pytest.raises(HillInferError, match=f"{key} may be read .* chmod 600 {key}"):
            read_key(key, "10.0.0.7")
    for mode in (0o600, 0o400):
        key.chmod(mode)
        assert read_key(key, "10.0.0.7") == "0123456789abcdef0123"
    # As whoever runs this, where nobody is named.
    for mode in (0o640, 0o600):
        key.chmod(mode)
        assert is_read(key) == is_read(key, key.stat().st_uid) == (mode == 0o600)
    # A service reads what is somebody else's as its group, and nobody besides.
    service = key.stat().st_uid + 1
    for mode in (0o444, 0o660, 0o641):
        key.chmod(mode)
        with pytest.raises(HillInferError, match=f"chmod 640 {key}"):
            read_key(key, "10.0.0.7", service)
    key.chmod(0o440)
    assert read_key(key, "10.0.0.7", service) == "0123456789abcdef0123"
