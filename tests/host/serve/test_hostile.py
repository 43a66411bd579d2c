# SPDX-License-Identifier: Apache-2.0
"""Requests that mean harm, and defects below them: each costs itself alone and is told as such."""

import itertools
import json
import random
import socket
import threading
import tracemalloc
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import openai
import pytest
from faulty_calls import Fault, FaultyCalls, Injection
from prometheus_client.parser import text_string_to_metric_families
from servers import CHAT, CHUNK, HTTP, running
from test_files import about, put, slowed, with_store
from waiting import until

from hillinfer.generate.answering import Generation
from hillinfer.serve.documents import Documents, with_documents
from hillinfer.serve.http import app
from hillinfer.serve.http.telemetry import Spans
from hillinfer.serve.refusals import ApiError
from hillinfer.serve.requests import chat_request
from hillinfer.serve.rules import ServerRules


def text(answer):
    return answer.choices[0].message.content


# --- doors ---


@pytest.mark.parametrize("headers", [{"host": "["}, {"host": "[::1"}, {"origin": "http://["}])
def test_addresses_that_are_none_are_kept_out(tiny_server, headers):
    answer = HTTP.get(f"{tiny_server.url}/v1/models", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"].startswith("forbidden_")


class DefectiveTokenizer:
    """A model's own tokenizer, which no longer tells how it writes chats while it is defective."""

    is_defective = False

    def __init__(self, own):
        self._own = own

    def __getattr__(self, name):
        return getattr(self._own, name)

    def __call__(self, *given, **options):
        return self._own(*given, **options)

    @property
    def chat_template(self):
        if self.is_defective:
            raise ValueError("secret words of the prompt")
        return self._own.chat_template


def test_a_defect_of_a_route_is_an_error_object(endless_folder, cold_dir):
    with (
        running(endless_folder, cold_dir, tokenizer=DefectiveTokenizer) as server,
        server.client() as client,
    ):
        expected = text(server.ask(CHAT, client))
        tokenizer = server.inference.served.tokenizer
        tokenizer.is_defective = True
        with pytest.raises(openai.InternalServerError) as failed:
            server.ask(CHAT, client)
        assert (failed.value.code, failed.value.type) == ("internal_error", "server_error")
        assert "secret" not in str(failed.value)
        tokenizer.is_defective = False
        assert text(server.ask(CHAT, client)) == expected


class SlowTokenizer(DefectiveTokenizer):
    """A model's own tokenizer, which makes no text of many tokens before it may."""

    def __init__(self, own):
        super().__init__(own)
        self.begun, self.may = threading.Event(), threading.Event()

    def decode(self, ids, **options):
        if len(ids) > 1000:
            self.begun.set()
            assert self.may.wait(20), "nobody else was answered"
        return self._own.decode(ids, **options)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/detokenize", {"tokens": [5] * 1001}),
        ("/v1/completions", {"prompt": [5] * 1001, "echo": True, "max_tokens": 1}),
    ],
)
def test_others_are_answered_while_many_tokens_become_a_text(endless_folder, cold_dir, path, asked):
    told = []

    def ask(url):
        told.append(HTTP.post(url, json={"model": "tiny"} | asked).status_code)

    with running(endless_folder, cold_dir, tokenizer=SlowTokenizer) as server:
        tokenizer = server.inference.served.tokenizer
        asking = threading.Thread(target=ask, args=(f"{server.url}{path}",))
        asking.start()
        assert tokenizer.begun.wait(20)
        assert HTTP.get(f"{server.url}/v1/models", timeout=10).status_code == 200
        tokenizer.may.set()
        asking.join()
    assert told == [200]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/completions"])
def test_more_tokens_than_the_context_become_no_text(tiny_server, path):
    def ask(count):
        given = "tokens" if path == "/detokenize" else "prompt"
        asked = {"model": "tiny", given: [5] * count, "max_tokens": 1, "echo": True}
        return HTTP.post(f"{tiny_server.url}{path}", json=asked)

    assert ask(4095).status_code == 200
    refused = ask(4097)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "a list of 4097 tokens" in error["message"]


def test_more_requests_than_anybody_answers(endless_folder, cold_dir):
    """Each is told so as an error object, and whoever looks after the server is let in."""
    parallel, queue, more = 1, 1, 256
    most = parallel + queue + more
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
    with (
        running(endless_folder, cold_dir, parallel=parallel, queue=queue) as server,
        server.client() as client,
        ExitStack() as opened,
    ):
        place = urlsplit(server.url)
        for _ in range(most):
            made = opened.enter_context(socket.create_connection((place.hostname, place.port)))
            made.sendall(head)
        until(lambda: server.server._gate.inside == most)
        with pytest.raises(openai.RateLimitError) as refused:
            server.ask(CHAT, client)
        assert refused.value.code == "too_many_requests"
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert HTTP.get(f"{server.url}/health").status_code == 200
        opened.close()
        until(lambda: server.server._gate.inside == 0)
        assert text(server.ask(CHAT, client))


# --- wishes ---


def test_a_large_body_is_not_taken_apart_where_others_wait(tiny_server, client, monkeypatch):
    """Its fields are looked at in a thread of their own."""
    seen = []

    def read(given):
        seen.append(threading.current_thread().name)
        return chat_request(given)

    monkeypatch.setattr(app, "chat_request", read)
    for size in (10, 100_000):
        with pytest.raises(openai.BadRequestError):
            tiny_server.ask([{"role": "user", "content": "a" * size}, {}], client)
    assert seen[0] == "server"
    assert seen[1] != "server"


def test_a_chat_of_more_messages_than_tokens(tiny_server, client):
    with pytest.raises(openai.BadRequestError) as refused:
        tiny_server.ask([{"role": "user", "content": ""}] * 4097, client)
    assert refused.value.code == "context_length_exceeded"


# --- defects in the thread that has the model ---


def test_a_sequence_that_cannot_be_closed_costs_nobody_an_answer(tiny_server, client, monkeypatch):
    def fail(generation):
        close(generation)
        raise RuntimeError(words)

    close, words = Generation.close, "struck"
    expected = text(tiny_server.ask(CHAT, client))
    before = len(tiny_server.logged("answer_failed"))
    monkeypatch.setattr(Generation, "close", fail)
    assert text(tiny_server.ask(CHAT, client)) == expected
    monkeypatch.undo()
    assert text(tiny_server.ask(CHAT, client)) == expected
    (line,) = tiny_server.logged("answer_failed")[before:]
    # Words of an error that nobody foresaw may be a prompt's: its kind and place are enough.
    assert line["error"] == "RuntimeError"
    assert "in fail" in line["detail"]
    assert words not in json.dumps(line)


class DefectiveSpans(Spans):
    """Makes no span of requests while it is defective."""

    is_defective = False

    def note(self, job, error):
        if self.is_defective:
            raise RuntimeError("struck")
        super().note(job, error)


def test_what_cannot_be_noted_costs_nobody_an_answer(endless_folder, cold_dir):
    spans = DefectiveSpans(None)
    with running(endless_folder, cold_dir, spans=spans) as server, server.client() as client:
        for spans.is_defective in (False, True, False):
            assert text(server.ask(CHAT, client))
        # Of the second one nothing is told.
        assert len(server.logged("answered")) == 2
        assert HTTP.get(f"{server.url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("kind", ["pwrite", "land"])
def test_a_drive_that_was_full_is_used_again(endless_folder, cold_dir, tmp_path, kind):
    """What is said meanwhile names the drive, and afterwards answers are those of before."""
    calls = FaultyCalls()
    made = {"dram_budget": "1600KiB", "block_rows": 16}
    # Rows are written where no store has them, and land from a store.
    opening = running if kind == "pwrite" else partial(with_store, directory=tmp_path / "store")
    with (
        opening(endless_folder, cold_dir, made=made, calls=calls) as server,
        server.client() as client,
    ):
        letters = random.Random(3)
        prompts = ["".join(letters.choice("abc def") for _ in range(600)) for _ in range(3)]
        expected = [text(server.ask(one, client, max_tokens=12)) for one in prompts[:2]]
        calls.injection = Injection(kind, None, Fault.ENOSPC)
        codes = set()
        for one in prompts:
            try:
                server.ask(one, client, max_tokens=12)
            except openai.InternalServerError as error:
                codes.add((error.status_code, error.code))
        assert codes == {(503, "drive_full")}
        calls.injection = None
        answers = [text(server.ask(one, client, max_tokens=12)) for one in prompts]
        assert answers[:2] == expected
        assert HTTP.get(f"{server.url}/health").json() == {"status": "ok"}


# --- files ---


def test_a_document_takes_no_place_of_a_request(endless_folder, cold_dir, tmp_path):
    """Also where nobody may wait."""
    with (
        with_store(endless_folder, cold_dir, tmp_path / "store", parallel=1, queue=0) as server,
        server.client() as client,
        slowed(server, 0.05),
    ):
        made = put(client, "cat " * 900)
        until(lambda: client.files.retrieve(made.id).hillinfer["tokens_done"] >= CHUNK)
        assert server.ask(CHAT, client, max_tokens=2).usage.completion_tokens == 2
        assert client.files.retrieve(made.id).status == "uploaded"


def test_a_long_file_that_is_named_often_is_not_put_together():
    book, names = "a" * 1_000_000, ["file-1"] * 100

    def check(letters):
        if letters > 2_000_000:
            raise ApiError(400, "too long", "context_length_exceeded")

    def put_together(named):
        return with_documents(
            [{"role": "user", "content": "why", "files": named}], lambda name: book, check
        )

    assert len(put_together(names[:1])[0]["content"]) == len(book) + 5
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            put_together(names)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_request_that_names_a_file_too_often(tiny_server, client):
    made = put(client, "cat " * 900)
    with pytest.raises(openai.BadRequestError) as refused:
        tiny_server.ask(about(*[made.id] * 1000), client)
    assert refused.value.code == "context_length_exceeded"
    client.files.delete(made.id)


def test_no_more_files_than_are_looked_at_in_a_turn(endless_folder, cold_dir):
    with running(endless_folder, cold_dir, most_files=2) as server, server.client() as client:
        made = [put(client, "cat").id for _ in range(2)]
        with pytest.raises(openai.APIStatusError) as full:
            put(client, "cat")
        assert (full.value.status_code, full.value.code) == (413, "files_full")
        client.files.delete(made[0])
        assert put(client, "cat").id


@pytest.fixture
def keeping(endless_folder, cold_dir, tmp_path):
    """A server that keeps files, their directory, and how it reaches the drive."""
    files, calls = tmp_path / "files", FaultyCalls()
    with (
        running(endless_folder, cold_dir, files=files, calls=calls) as server,
        server.client() as client,
    ):
        yield client, files, calls


@pytest.mark.parametrize(
    ("fault", "code"), [(Fault.ENOSPC, "drive_full"), (Fault.EIO, "drive_failed")]
)
def test_a_file_that_cannot_be_kept_leaves_nothing(keeping, fault, code):
    client, files, calls = keeping
    calls.injection = Injection("fsync", None, fault)
    with pytest.raises(openai.InternalServerError) as failed:
        put(client, "cat")
    calls.injection = None
    assert failed.value.code == code
    assert list(files.iterdir()) == []
    assert list(client.files.list()) == []
    assert put(client, "cat").id


def test_a_file_whose_drive_does_not_let_it_go_is_not_told_as_deleted(keeping):
    """It would be back with the next server."""
    client, files, calls = keeping
    made = put(client, "cat")
    calls.begin(Injection("unlink", None, Fault.EIO))
    with pytest.raises(openai.InternalServerError) as failed:
        client.files.delete(made.id)
    calls.begin()
    assert failed.value.code == "drive_failed"
    assert [one.id for one in client.files.list()] == [made.id]
    assert client.files.delete(made.id).deleted
    assert list(client.files.list()) == list(files.iterdir()) == []


def test_kept_files_are_known_before_the_model(keeping):
    """Nobody is told that a file is gone that is only not read yet."""
    client, files, _ = keeping
    made = put(client, "cat")
    (files / f"{made.id}.part").write_text("what a killed server left")
    found = Documents(None, ServerRules(files=files))
    assert found.get(made.id, b"").as_json()["status"] == "uploaded"
    with pytest.raises(ApiError) as early:
        found.text(made.id, b"")
    assert early.value.code == "file_processing"
    assert [one.suffix for one in files.iterdir()] == [".json"]


class DeletedMeanwhile(Documents):
    """Has another request delete a file once it was found."""

    is_armed = False

    def get(self, name, tenant):
        found = super().get(name, tenant)
        if self.is_armed:
            self.is_armed = False
            self.remove(name, tenant)
        return found


@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "kept"])
def test_a_file_that_goes_while_it_is_named_is_no_empty_text(kept, tmp_path):
    """Nor is that a drive's failure."""
    prompts = SimpleNamespace(of_chat=lambda messages: [1, 2])
    served = SimpleNamespace(prompts=prompts, store=None, context_tokens=64)
    rules = ServerRules(files=tmp_path / "files" if kept else None)
    documents = DeletedMeanwhile(SimpleNamespace(served=served), rules)
    made = documents.add("book.txt", b"the cat", b"")
    assert documents.content(made.name, b"") == "the cat"
    documents.is_armed = True
    with pytest.raises(ApiError) as gone:
        documents.content(made.name, b"")
    assert (gone.value.status, gone.value.code) == (404, "file_not_found")


# --- what is counted ---


def test_counters_only_grow_and_are_named_so(endless_folder, cold_dir, tmp_path):
    """Also where sequences end and are left, with everything that they had counted."""

    def counters():
        text = HTTP.get(f"{server.url}/metrics").text
        found = {}
        for family in text_string_to_metric_families(text):
            assert family.documentation, family.name
            for sample in family.samples:
                if family.type == "counter" and not sample.name.endswith("_created"):
                    assert sample.name.endswith("_total")
                    found[sample.name, *sample.labels.items()] = sample.value
                else:
                    assert not sample.name.endswith("_total")
        return found

    with (
        with_store(endless_folder, cold_dir, tmp_path / "store") as server,
        server.client() as client,
    ):
        told = [counters()]
        for number in range(4):
            stream = server.ask("cat " * (30 + 20 * number), client, stream=True, max_tokens=40)
            if number % 2:
                next(iter(stream))
                stream.close()
            else:
                list(stream)
            until(lambda: server.inference.is_idle)
            told.append(counters())
    assert ("hillinfer_store_lookups_total",) in told[0]
    for before, after in itertools.pairwise(told):
        assert {name: value for name, value in before.items() if after[name] < value} == {}
    assert sum(told[-1].values()) > sum(told[0].values())
    rows = ("hillinfer_selected_rows_total", ("pool", "hot"))
    assert told[-1][rows] > told[1][rows] > 0
