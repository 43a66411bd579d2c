# SPDX-License-Identifier: Apache-2.0
"""The router before replicas that compute nothing: who is asked, and what a dead one costs."""

import threading

import httpx
import pytest
from replicas import HTTP, KEY, SPACE, Replica, placed, wait_until

from hillinfer.store.keys import group_keys, root_key
from hillinfer_hosts.announcing import RouterDirectory
from hillinfer_hosts.choice import Candidate, Expected, make_policy
from hillinfer_hosts.directory import Change, Host, HostsError

TEXT = "the cat sat on the mat " * 20
OTHER = "a dog lay in the fog " * 20
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("holder", ["a", "b"])
def test_a_prompt_goes_to_who_has_read_it(path, holder):
    with placed() as place:
        place.holds(holder, TEXT)
        for _ in range(4):
            assert place.ask(TEXT, path).headers["X-HillInfer-Host"] == holder
        # What nobody has read goes to both of them.
        others = {place.ask(OTHER[at:], path).headers["X-HillInfer-Host"] for at in range(6)}
        assert others == {"a", "b"}


def test_the_longest_prefix_counts_and_another_tenant_does_not():
    with placed("abc") as place:
        place.holds("a", TEXT[:128])
        place.holds("b", TEXT[:256])
        place.holds("c", TEXT, b"tenant")
        assert place.ask(TEXT).headers["X-HillInfer-Host"] == "b"
        assert place.ask(TEXT, cache_salt="tenant").headers["X-HillInfer-Host"] == "c"
        assert place.ask(TEXT[:128] + OTHER).headers["X-HillInfer-Host"] in "ab"


def test_tokens_that_are_given_are_not_made_again():
    with placed() as place:
        place.holds("b", TEXT)
        place.replicas["a"].tokenizes = place.replicas["b"].tokenizes = False
        ids = [ord(one) for one in TEXT]
        assert [place.ask(ids).headers["X-HillInfer-Host"] for _ in range(3)] == ["b"] * 3
        # Who cannot make tokens costs the way to the holder, and no answer.
        assert {place.ask(TEXT).headers["X-HillInfer-Host"] for _ in range(4)} == {"a", "b"}


def test_prompts_with_one_beginning_that_come_together_go_to_one_host():
    with placed("abc") as place:
        first = place.ask(TEXT + "x" * 70).headers["X-HillInfer-Host"]
        for end in "yzw":
            assert place.ask(TEXT + end * 70).headers["X-HillInfer-Host"] == first


def test_a_beginning_that_all_prompts_have_does_not_send_all_to_one_host():
    with placed("abc") as place:
        common = TEXT[:64]
        place.holds("a", common)
        for at in range(12):
            place.ask(common + OTHER[at:])
        assert place.counted() == {"a": 4, "b": 4, "c": 4}


def test_who_leaves_a_stream_leaves_its_host():
    with placed("a") as place:
        own = place.replicas["a"]
        own.pause, own.words = 0.02, ["word"] * 500
        told = {"prompt": TEXT, "stream": True}
        with HTTP.stream("POST", f"{place.url}/v1/completions", json=told) as answer:
            # Held: letting go of the lines lets go of the answer.
            lines = answer.iter_lines()
            next(lines)
            assert place.under_way == {"a": 1}
        wait_until(lambda: not place.under_way)


def test_who_leaves_before_an_answer_leaves_its_host():
    with placed("a") as place:
        place.replicas["a"].held_up.clear()
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(f"{place.url}/v1/completions", json={"prompt": TEXT}, timeout=0.5)
        wait_until(lambda: not place.under_way)
        # The replica sees it too, which ends its work.
        wait_until(place.replicas["a"].is_left)
        place.replicas["a"].held_up.set()


def test_a_busy_holder_is_passed_by():
    with placed("ab") as place:
        place.holds("a", TEXT)
        holder = place.replicas["a"]
        holder.held_up.clear()
        threads = [threading.Thread(target=place.ask, args=(TEXT,)) for _ in range(5)]
        for one in threads:
            one.start()
        wait_until(lambda: len(holder.asked) >= 5)
        assert place.ask(TEXT).headers["X-HillInfer-Host"] == "b"
        holder.held_up.set()
        for one in threads:
            one.join()
        # Idle again; the other one has read it meanwhile as well.
        assert place.ask(TEXT).status_code == 200


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin"])
def test_other_policies_look_at_no_prefix(policy):
    with placed("ab", policy) as place:
        place.holds("a", TEXT)
        for _ in range(6):
            place.ask(TEXT)
        assert place.counted() == {"a": 3, "b": 3}


def test_requests_pass_as_they_are():
    with placed("a") as place:
        headers = {"Authorization": "Bearer of a client", "X-Request-Id": "seven"}
        place.ask(TEXT, headers=headers, temperature=0.5)
        path, told, passed = place.replicas["a"].asked[0]
        assert (path, told) == ("/v1/completions", {"prompt": TEXT, "temperature": 0.5})
        assert passed["authorization"] == "Bearer of a client"
        assert passed["x-request-id"] == "seven"
        listed = HTTP.get(f"{place.url}/v1/models?x=1")
        assert listed.json() == {"path": "/v1/models?x=1", "of": "a"}
        listed = HTTP.get(f"{place.url}/v1/models/a%2Fb%3Fc?x=%20")
        assert listed.json()["path"] == "/v1/models/a%2Fb%3Fc?x=%20"
        place.replicas["a"].status = 400
        assert place.ask(TEXT).status_code == 400
        assert HTTP.get(f"{place.url}/v1/files").status_code == 501
        assert HTTP.post(f"{place.url}/v1/completions", content=b"{no json").status_code >= 400


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_host_without_room_is_passed_by(status):
    with placed("ab") as place:
        place.holds("a", TEXT)
        place.replicas["a"].status = status
        assert place.ask(TEXT).json()["of"] == "b"
        place.replicas["b"].status = status
        assert place.ask(TEXT).status_code == status


def test_a_host_that_is_gone_costs_no_answer_and_is_forgotten():
    with placed("ab") as place:
        place.holds("a", TEXT)
        place.replicas["a"].shutdown()
        place.replicas["a"].server_close()
        assert [place.ask(TEXT).json()["of"] for _ in range(3)] == ["b"] * 3
        assert [one.name for one in place.directory.hosts()] == ["b"]
        metrics = HTTP.get(f"{place.url}/metrics").text
        assert 'hillinfer_router_lost_hosts_total{host="a"} 1.0' in metrics
        place.replicas["b"].shutdown()
        place.replicas["b"].server_close()
        assert place.ask(TEXT).status_code == 503
        assert HTTP.get(f"{place.url}/health").status_code == 503


def test_a_host_that_dies_over_an_answer_costs_its_time():
    with placed("ab") as place:
        place.holds("a", TEXT)
        place.replicas["a"].dies_after = 0
        assert place.ask(TEXT).json()["of"] == "b"
        assert place.counted() == {"a": 1, "b": 1}


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("dies_after", [None, 0, 1, 2, 3])
def test_a_stream_goes_on_behind_a_host_that_died(path, dies_after):
    with placed("ab") as place:
        place.holds("a", TEXT)
        place.replicas["a"].dies_after = dies_after
        # The other one says the same in other pieces.
        place.replicas["b"].words = ["on", "e two th", "ree four"]
        events, text, names = place.streamed(TEXT, path)
        assert text == "one two three four"
        assert events[-1] == "data: [DONE]"
        assert len(names) == 1
        assert sum('"finish_reason": "stop"' in one for one in events) == 1
        assert place.counted()["b"] == (dies_after is not None)


@pytest.mark.parametrize("words", [["another", " answer"], ["one"]])
def test_a_stream_that_would_go_on_otherwise_ends_with_an_error(words):
    with placed("ab") as place:
        place.holds("a", TEXT)
        place.replicas["a"].dies_after = 2
        place.replicas["b"].words = words
        events, text, _ = place.streamed(TEXT)
        assert "one two three".startswith(text)
        assert "host_lost" in events[-1]


def test_rows_are_brought_to_who_lacks_them_where_that_was_asked_for():
    with placed("ab", transfer_tokens=128) as place:
        place.holds("a", TEXT)
        holder = place.replicas["a"]
        holder.held_up.clear()
        threads = [threading.Thread(target=place.ask, args=(TEXT,)) for _ in range(5)]
        for one in threads:
            one.start()
        wait_until(lambda: len(holder.asked) >= 5)
        assert place.ask(TEXT).headers["X-HillInfer-Host"] == "b"
        holder.held_up.set()
        for one in threads:
            one.join()
        ((told, key),) = place.replicas["b"].fetched
        assert key == f"Bearer {KEY}"
        assert told["source"] == holder.url
        assert told["namespace"] == SPACE.hex()
        assert len(told["ids"]) == len(TEXT) // 64 * 64
        assert not holder.fetched
        assert "brought_tokens_total 128.0" in HTTP.get(f"{place.url}/metrics").text


def test_hosts_announce_themselves_through_the_router_with_the_key():
    with placed("a") as place:
        new = Replica("new")
        told = Host("new", new.url, "", "1", (SPACE,))
        for key in ("", "another key of hosts"):
            with pytest.raises(HostsError, match="401"):
                RouterDirectory(place.url, key).announce(told, Change(is_whole=True))
            assert HTTP.get(f"{place.url}/hosts").status_code == 401
        directory = RouterDirectory(place.url, KEY)
        assert not directory.announce(told, Change())
        assert directory.announce(told, Change(is_whole=True))
        assert directory.announce(told, Change())
        listed = HTTP.get(f"{place.url}/hosts", headers={"Authorization": f"Bearer {KEY}"}).json()
        assert [one["name"] for one in listed["hosts"]] == ["a", "new"]
        headers = {"Authorization": f"Bearer {KEY}"}
        wrong = HTTP.post(f"{place.url}/hosts/announce", json={"host": 1}, headers=headers)
        assert wrong.status_code == 400
        directory.close()
        new.server_close()


def test_the_prefix_policy_weighs_load():
    policy = make_policy("prefix")
    held = Candidate("a", 0.8, 4), Candidate("b", 0, 0)
    assert policy.choose(held).name == "a"
    assert policy.choose((Candidate("a", 0.8, 5), Candidate("b", 0, 0))).name == "b"
    both = (Candidate("a", 0.8, 1), Candidate("b", 0.8, 0), Candidate("c", 0, 0))
    assert policy.choose(both).name == "b"
    # What all prompts begin with sends nobody anywhere.
    little = (Candidate("a", 0.24, 1), Candidate("b", 0, 0))
    assert policy.choose(little).name == "b"
    assert policy.choose((Candidate("a", 0.25, 1), Candidate("b", 0, 0))).name == "a"


def test_what_is_expected_ends():
    now = [0.0]
    expected = Expected(lambda: now[0])
    keys = [bytes([at]) * 32 for at in range(40)]
    expected.note(keys, "a")
    assert expected.longest(keys) == {"a": 40}
    assert expected.longest(keys[:3]) == {"a": 3}
    expected.note(keys[:16], "b")
    assert expected.longest(keys) == {"a": 40, "b": 16}
    expected.forget("a")
    assert expected.longest(keys) == {"b": 16}
    now[0] = 61.0
    assert expected.longest(keys) == {}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_host_that_is_slow_is_not_lost(is_streamed):
    with placed("abc", answer_seconds=0.3) as place:
        place.holds("a", TEXT)
        place.replicas["a"].held_up.clear()
        answer = place.ask(TEXT, stream=is_streamed)
        place.replicas["a"].held_up.set()
        assert answer.status_code == 504
        # Nobody else was asked, and all are known as before.
        assert place.counted() == {"a": 1, "b": 0, "c": 0}
        assert [one.name for one in place.directory.hosts()] == ["a", "b", "c"]
        assert 'lost_hosts_total{host="a"}' not in HTTP.get(f"{place.url}/metrics").text
        assert place.ask(TEXT).json()["of"] == "a"


def test_a_stream_that_stops_is_ended_and_its_host_not_lost():
    with placed("ab", answer_seconds=0.3) as place:
        place.holds("a", TEXT)
        place.replicas["a"].pause = 1.0
        events, _, _ = place.streamed(TEXT)
        assert "took too long" in events[-1]
        assert [one.name for one in place.directory.hosts()] == ["a", "b"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_kills_hosts_kills_two(is_streamed):
    with placed("abcd") as place:
        for one in place.replicas.values():
            one.dies_after = 0
        answer = place.ask(TEXT, stream=is_streamed)
        assert "lost" in answer.text
        assert is_streamed or answer.status_code == 502
        assert sum(place.counted().values()) == 2
        assert len(place.directory.hosts()) == 2


def test_hosts_that_take_no_connection_do_not_count_as_tries():
    with placed("abcd") as place:
        for name in "abc":
            place.replicas[name].shutdown()
            place.replicas[name].server_close()
        assert [place.ask([1] * 64).json()["of"] for _ in range(3)] == ["d"] * 3


def test_headers_pass_as_they_are():
    with placed("a") as place:
        place.replicas["a"].headers = [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Odd", "é")]
        headers = [(b"X-Odd", "naïve".encode("latin-1")), (b"X-Two", b"1"), (b"X-Two", b"2")]
        for told in ({"prompt": TEXT}, {"prompt": TEXT, "stream": True}):
            answer = HTTP.post(f"{place.url}/v1/completions", json=told, headers=headers)
            assert answer.status_code == 200
            assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
            assert (b"x-odd", "é".encode("latin-1")) in [
                (name.lower(), value) for name, value in answer.headers.raw
            ]
        assert place.replicas["a"].asked[0][2]["x-odd"] == "naïve"
        assert place.replicas["a"].pairs.count(("x-two", "1")) == 2
        assert place.replicas["a"].pairs.count(("x-two", "2")) == 2


def test_a_salt_of_half_a_character_is_passed_on():
    with placed("a") as place:
        told = b'{"prompt": "' + TEXT.encode() + b'", "cache_salt": "\\ud800"}'
        headers = {"Content-Type": "application/json"}
        answer = HTTP.post(f"{place.url}/v1/completions", content=told, headers=headers)
        assert answer.status_code == 200


def test_rows_of_every_rank_come_and_of_other_engines_none():
    spaces = [bytes([at]) * 32 for at in range(3)]
    with placed("ab", transfer_tokens=128) as place:
        ids = [ord(one) for one in TEXT]
        keys = [key for space in spaces for key in group_keys(root_key(space), ids)]
        for name, own, held in (("a", spaces, keys), ("b", spaces[:2], [])):
            url = place.replicas[name].url
            place.directory.announce(Host(name, url, url, "1", tuple(own)), Change(held, [], True))
        holder = place.replicas["a"]
        holder.status = 429
        assert place.ask(TEXT).json()["of"] == "b"
        brought = [told["namespace"] for told, _ in place.replicas["b"].fetched]
        assert sorted(brought) == [one.hex() for one in spaces[:2]]
