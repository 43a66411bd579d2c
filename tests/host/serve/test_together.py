# SPDX-License-Identifier: Apache-2.0
"""Many requests at once: each has its own answer, its turn, and its end when nobody waits."""

import itertools
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from servers import CHAT, CHUNK, HTTP, running
from waiting import until

from hillinfer.native.library import native_library
from hillinfer.projections.ways import FewRowsLayers
from hillinfer.serve.jobs import CANCELLED
from hillinfer.serve.rules import ApiKeys
from hillinfer.store.store import Store

KEYS = ("sk-of-anna-0001", "sk-of-bert-0002")


@pytest.fixture(scope="module")
def joined_server(endless_folder, cold_dir):
    """Up to six sequences at once, whose products have the bits that they have alone."""
    with running(endless_folder, cold_dir, projections="rows", parallel=6) as server:
        yield server


def text(answer):
    return answer.choices[0].message.content


def secret(number):
    letters = random.Random(number)
    return "".join(letters.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(20 + 13 * number))


def test_answers_together_are_those_of_each_alone(joined_server):
    """Bit by bit: no request sees anything of another one's."""
    prompts = [secret(number) for number in range(9)]
    with joined_server.client() as client:
        alone = [text(joined_server.ask(one, client, max_tokens=16)) for one in prompts]
        assert len({*alone}) == len(alone)
        before = len(joined_server.passes.columns)
        joined_server.passes.before = lambda columns: time.sleep(0.02)
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(joined_server.ask, one, client, max_tokens=16) for one in prompts]
            together = [text(one.result()) for one in asked]
        joined_server.passes.before = lambda columns: None
    assert together == alone
    rows = [rows for rows, columns in joined_server.passes.columns[before:] if columns == 1]
    assert max(rows) > 2
    assert len(rows) < 9 * 15


@pytest.mark.parametrize(("parallel", "way"), [(3, "stock"), (1, "stock"), (1, "steps")])
def test_steps_compute_few_rows_another_way_where_several_may_be_open(
    endless_folder, cold_dir, parallel, way
):
    """Alone as beside others; with one at a time as it was told to, and reading never."""
    told, variant = [], native_library().variants[0].number

    def note(layer, given, out):
        states = given[0]
        own = FewRowsLayers([(layer.weight, layer.bias)], variant)
        is_own = own.takes(states) and torch.equal(out, own.outputs(states)[0])
        stock = torch.nn.functional.linear(states, layer.weight, layer.bias)
        told.append((states.shape[:2], is_own, torch.equal(out, stock)))

    def watch(passes, model):
        passes.put_on(model)
        passes.before = lambda columns: time.sleep(0.01)
        # Of a step it has a row for each sequence, and of reading a row for each token.
        model.model.layers[0].mlp.down_proj.register_forward_hook(note)

    with (
        running(
            endless_folder, cold_dir, projections=way, counts=watch, parallel=parallel
        ) as server,
        server.client() as client,
        ThreadPoolExecutor(3) as pool,
    ):
        apart = [text(server.ask(secret(n), client, max_tokens=16)) for n in range(3)]
        asked = [pool.submit(server.ask, secret(n), client, max_tokens=16) for n in range(3)]
        assert [text(one.result()) for one in asked] == apart
    steps = [one for one in told if one[0][1] == 1]
    alone = [one for one in steps if one[0][0] == 1]
    reading = [one for one in told if one[0][1] > 1]
    assert len(alone) >= 15
    assert reading
    assert all(is_stock for *_, is_stock in reading)
    assert (parallel == 1) == (steps == alone)
    if (parallel, way) == (1, "stock"):
        assert all(is_stock for *_, is_stock in steps)
        assert not all(is_own for _, is_own, _ in steps)
    else:
        assert all(is_own for _, is_own, _ in steps)
        assert not all(is_stock for *_, is_stock in alone)


def test_a_row_that_fails_leaves_the_others_alone(joined_server):
    """One of two answers that step together fails for itself."""
    struck = threading.Event()

    def strike(columns):
        time.sleep(0.01)
        # Together, and then the first of them by itself.
        if columns == (2, 1) or (struck.is_set() and columns == (1, 1)):
            first = not struck.is_set()
            struck.set()
            if not first:
                joined_server.passes.before = lambda columns: None
            raise RuntimeError("struck")

    with joined_server.client() as client, ThreadPoolExecutor(2) as pool:
        expected = {text(joined_server.ask(secret(n), client, max_tokens=90)) for n in (1, 2)}
        joined_server.passes.before = strike
        asked = [pool.submit(joined_server.ask, secret(n), client, max_tokens=90) for n in (1, 2)]
        ended = [one.exception() for one in asked]
        joined_server.passes.before = lambda columns: None
    assert struck.is_set()
    failed = [one for one in ended if one is not None]
    assert [type(one) for one in failed] == [openai.InternalServerError]
    (answer,) = [text(one.result()) for one in asked if one.exception() is None]
    assert answer in expected


def test_a_short_prompt_does_not_wait_for_a_long_one(joined_server):
    """And an answer under way goes on: nobody starves."""
    done, long = [], "a" * (40 * CHUNK)
    slow = lambda columns: time.sleep(0.01)  # noqa: E731

    def ask(name, content, **options):
        with joined_server.client() as client:
            joined_server.ask(content, client, **options)
        done.append(name)

    joined_server.passes.before = slow
    begun = len(joined_server.passes.columns)
    try:
        threads = [threading.Thread(target=ask, args=("long", long), kwargs={"max_tokens": 1})]
        threads[0].start()
        until(lambda: len(joined_server.passes.columns) > begun + 2)
        threads += [
            threading.Thread(target=ask, args=(f"short {n}", secret(n)), kwargs={"max_tokens": 4})
            for n in range(3)
        ]
        for one in threads[1:]:
            one.start()
        for one in threads:
            one.join()
    finally:
        joined_server.passes.before = lambda columns: None
    assert done[-1] == "long"
    passes = joined_server.passes.columns[begun:]
    reads = [place for place, (_, columns) in enumerate(passes) if columns > 1]
    steps = [place for place, (_, columns) in enumerate(passes) if columns == 1]
    assert len(steps) >= 3
    # Steps lie between reads of the long prompt.
    assert reads[0] < steps[0] < steps[-1] < reads[-1]


def test_an_answer_under_way_waits_for_one_chunk_at_most(joined_server):
    """However long the prompt is that somebody else sends."""
    joined_server.passes.before = lambda columns: time.sleep(0.005)
    try:
        with joined_server.client() as client, ThreadPoolExecutor(1) as pool:
            stream = joined_server.ask(CHAT, client, max_tokens=150, stream=True)
            next(iter(stream))
            begun = len(joined_server.passes.columns)
            asked = pool.submit(joined_server.ask, "a" * (30 * CHUNK), max_tokens=1)
            for _ in stream:
                pass
            ended = len(joined_server.passes.columns)
            asked.result()
    finally:
        joined_server.passes.before = lambda columns: None
    kinds = [columns > 1 for _, columns in joined_server.passes.columns[begun:ended]]
    assert sum(kinds) >= 20
    assert not any(one and then for one, then in itertools.pairwise(kinds))


def test_a_long_prompt_is_read_under_many_short_ones(joined_server):
    """Each of its chunks waits for one of each other prompt at most."""
    joined_server.passes.before = lambda columns: time.sleep(0.002)
    ended = threading.Event()

    def short(number):
        with joined_server.client() as client:
            while not ended.is_set():
                joined_server.ask(secret(number), client, max_tokens=1)

    threads = [threading.Thread(target=short, args=(n,)) for n in range(6)]
    for one in threads:
        one.start()
    try:
        with joined_server.client() as client:
            answer = joined_server.ask("a" * (12 * CHUNK), client, max_tokens=4)
    finally:
        ended.set()
        for one in threads:
            one.join()
        joined_server.passes.before = lambda columns: None
    assert answer.usage.completion_tokens == 4


def test_stored_prompts_that_come_at_once_are_opened_without_steps_between(
    endless_folder, cold_dir, tmp_path
):
    """Those that a store brings; of those that are read whole each chunk lies between steps."""
    # With what a chat has around them six tokens more than three chunks, and three chunks.
    stored = [secret(n)[: 3 * CHUNK + 3] for n in (16, 17, 18)]
    new = [secret(n)[: 3 * CHUNK - 3] for n in (19, 20, 21)]
    Store.create(tmp_path / "store", 64 << 20)
    with (
        Store(tmp_path / "store") as store,
        running(endless_folder, cold_dir, store=store, parallel=4) as server,
        server.client() as client,
        ThreadPoolExecutor(4) as pool,
    ):
        for one in stored:
            while not server.ask(one, client).usage.prompt_tokens_details.cached_tokens:
                pass
        kinds = {}
        for name, prompts in (("stored", stored), ("new", new)):
            held, inside = threading.Event(), threading.Event()

            def hold(columns, held=held, inside=inside):
                inside.set()
                held.wait(30)

            stream = server.ask(CHAT, client, max_tokens=60, stream=True)
            next(iter(stream))
            server.passes.before = hold
            assert inside.wait(30)
            begun = server.passes.count
            asked = [pool.submit(server.ask, one, max_tokens=2) for one in prompts]
            until(lambda: len(server.inference._waiting) == 3)
            server.passes.before = lambda columns: None
            held.set()
            for one in asked:
                one.result()
            stream.close()
            until(lambda: server.inference.is_idle)
            columns = [count for _, count in server.passes.columns[begun:]]
            first = next(place for place, count in enumerate(columns) if count > 1)
            last = max(place for place, count in enumerate(columns) if count > 1)
            kinds[name] = [count > 1 for count in columns[first : last + 1]]
    assert kinds["stored"] == [True] * 3
    assert sum(kinds["new"]) > 6
    assert not any(one and then for one, then in itertools.pairwise(kinds["new"]))


# --- clients that leave ---


def leave(server, *, streamed, prompt="the cat", answers=1, after=3):
    """Ask for a long answer, leave after some passes, and return the passes that follow."""
    ended = len(server.logged("answered"))
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}]}
    body |= {"max_tokens": 1500, "stream": streamed, "n": answers}
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    begun = server.passes.count
    made.sendall(head.encode() + data)
    until(lambda: server.passes.count >= begun + after)
    made.close()
    until(lambda: len(server.logged("answered")) > ended)
    assert server.logged("answered")[-1]["finish"] == CANCELLED
    assert server.inference.is_idle
    return server.passes.count - begun


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("what", ["reading", "answering", "several"])
def test_who_leaves_ends_the_work(joined_server, streamed, what):
    given = {
        "reading": {"prompt": "a" * (35 * CHUNK)},
        "answering": {},
        "several": {"answers": 4},
    }[what]
    joined_server.passes.before = lambda columns: time.sleep(0.01)
    try:
        passes = leave(joined_server, streamed=streamed, **given)
    finally:
        joined_server.passes.before = lambda columns: None
    # What was under way when it left, and while the news came; not 35 and 1500.
    assert passes < 25
    assert joined_server.ask(CHAT).usage.completion_tokens == 12


def test_who_is_cancelled_gets_no_pass_more(joined_server):
    """The work ends with the pass that is under way."""
    held, inside = threading.Event(), threading.Event()

    def hold(columns):
        if columns[1] == 1:
            inside.set()
            held.wait(30)

    joined_server.passes.before = hold
    ended = len(joined_server.logged("answered"))
    with joined_server.client() as client:
        stream = joined_server.ask(CHAT, client, max_tokens=500, stream=True)
        assert inside.wait(30)
        begun = joined_server.passes.count
        stream.close()
        (job,) = joined_server.inference._scheduler._answering
        until(lambda: job.is_cancelled)
    held.set()
    until(lambda: len(joined_server.logged("answered")) > ended)
    joined_server.passes.before = lambda columns: None
    assert joined_server.passes.count == begun


def test_many_leave_at_random_moments(joined_server):
    """Nothing is left of any of them."""
    moments = random.Random(4)
    threads, open_files = threading.active_count(), _open_files()
    budget = joined_server.inference.served.statistics.dram_budget_bytes
    for _ in range(25):
        with joined_server.client() as client:
            stream = joined_server.ask(
                secret(moments.randrange(9)), client, max_tokens=400, stream=True
            )
            for _ in range(moments.randrange(4)):
                next(iter(stream), None)
            stream.close()
    until(lambda: joined_server.inference.is_idle)
    assert joined_server.inference.served.statistics.dram_budget_bytes == budget
    until(lambda: threading.active_count() <= threads + 4)
    until(lambda: _open_files() <= open_files + 8)
    assert HTTP.get(f"{joined_server.url}/health").json() == {"status": "ok"}


def _open_files():
    from pathlib import Path

    return len(list(Path("/proc/self/fd").iterdir()))


# --- streams ---


def test_a_silent_stream_pings_and_an_error_in_its_middle_is_an_event(endless_folder, cold_dir):
    held = threading.Event()

    def hold(columns):
        if columns[1] == 1:
            assert held.wait(30)
            raise RuntimeError("struck")

    body = {"model": "tiny", "messages": CHAT, "stream": True}
    with running(endless_folder, cold_dir, ping_seconds=0.1) as server:
        server.passes.before = hold
        parts = []
        with HTTP.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                parts += [line] if line else []
                if line.startswith(": ping"):
                    held.set()
    assert [one.split()[1] for one in parts if one.startswith(":")][:3] == [
        "progress", "progress", "ping"
    ]  # fmt: skip
    last = json.loads(parts[-1].removeprefix("data: "))
    assert last["error"]["code"] == "internal_error"
    assert "[DONE]" not in str(parts)


# --- stored prompts ---


@pytest.fixture(scope="module")
def stored(endless_folder, cold_dir, tmp_path_factory):
    """A server with a store and two keys, and the store's directory."""
    directory = tmp_path_factory.mktemp("kept") / "store"
    Store.create(directory, 64 << 20)
    with (
        Store(directory) as store,
        running(endless_folder, cold_dir, store=store, keys=ApiKeys(KEYS)) as server,
    ):
        yield server


def test_a_conversation_goes_on_in_the_store(stored):
    talk = [{"role": "user", "content": secret(20)}]
    with stored.client(KEYS[0]) as client:
        first = stored.ask(talk, client)
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        again = stored.ask(talk, client)
        # All whole groups of 64 but the last token.
        read = first.usage.prompt_tokens
        assert again.usage.prompt_tokens_details.cached_tokens == (read - 1) // 64 * 64
        assert text(again) == text(first)
        talk += [{"role": "assistant", "content": text(first)}, {"role": "user", "content": "why"}]
        on = stored.ask(talk, client)
        assert on.usage.prompt_tokens_details.cached_tokens == read // 64 * 64
        other = stored.ask(secret(20)[:-30] + "b" * 30, client)
        assert 0 < other.usage.prompt_tokens_details.cached_tokens < read // 64 * 64


def test_tenants_find_nothing_of_each_other(stored):
    prompt = secret(21)
    with stored.client(KEYS[0]) as anna, stored.client(KEYS[1]) as bert:
        first = stored.ask(prompt, anna)
        others = stored.ask(prompt, bert)
        assert others.usage.prompt_tokens_details.cached_tokens == 0
        assert text(others) == text(first)
        assert stored.ask(prompt, bert).usage.prompt_tokens_details.cached_tokens > 0
        assert stored.ask(prompt, anna).usage.prompt_tokens_details.cached_tokens > 0
    metrics = HTTP.get(f"{stored.url}/metrics", headers={"authorization": f"Bearer {KEYS[0]}"}).text
    assert "hillinfer_store_hit_tokens" in metrics


def test_what_was_stored_is_there_after_a_restart(endless_folder, cold_dir, tmp_path):
    Store.create(tmp_path / "store", 64 << 20)
    told = []
    for _ in range(2):
        with (
            Store(tmp_path / "store") as store,
            running(endless_folder, cold_dir, store=store) as server,
        ):
            told.append(server.ask(secret(15)))
    assert [one.usage.prompt_tokens_details.cached_tokens > 0 for one in told] == [False, True]
    assert text(told[0]) == text(told[1])


# --- the end ---


@pytest.mark.parametrize("patient", [True, False])
def test_draining(endless_folder, cold_dir, patient):
    """Who is there is answered and nobody comes in; asked twice, all end."""
    with running(endless_folder, cold_dir) as server, ThreadPoolExecutor(1) as pool:
        server.passes.before = lambda columns: time.sleep(0.01)
        client = server.client()
        asked = pool.submit(server.ask, CHAT, client, max_tokens=60)
        until(lambda: server.passes.count > 3)
        server.server.end()
        until(lambda: HTTP.get(f"{server.url}/health").json() == {"status": "draining"})
        assert HTTP.get(f"{server.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError) as refused:
            server.ask(CHAT, client)
        assert refused.value.code == "draining"
        if patient:
            assert asked.result().usage.completion_tokens == 60
        else:
            server.server.end()
            assert isinstance(asked.exception(), openai.APIError)
        client.close()
