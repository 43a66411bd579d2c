# SPDX-License-Identifier: Apache-2.0
"""Files are read ahead into the store, beside requests, and answered from there."""

import errno
import os
import threading
import time
from contextlib import contextmanager

import openai
import pytest
from servers import CHUNK, HTTP, running
from waiting import until

from hillinfer.drive.calls import DriveCalls
from hillinfer.serve.rules import ApiKeys
from hillinfer.store.store import Store

KEYS = ("sk-of-anna-0001", "sk-of-bert-0002")
BOOK = "".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(40))
QUESTION = "where is the cat?"


@contextmanager
def with_store(folder, cold_dir, directory, **rules):
    if not Store.exists(directory):
        Store.create(directory, 64 << 20)
    with (
        Store(directory) as store,
        running(folder, cold_dir, store=store, **rules) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def library(endless_folder, cold_dir, tmp_path_factory):
    """A server of one sequence at a time, with a store, two keys and room for little."""
    directory = tmp_path_factory.mktemp("library") / "store"
    rules = {"keys": ApiKeys(KEYS), "parallel": 1, "files_bytes": 6000}
    with with_store(endless_folder, cold_dir, directory, **rules) as server:
        yield server


@pytest.fixture
def anna(library):
    with library.client(KEYS[0]) as client:
        yield client
        for one in client.files.list():
            client.files.delete(one.id)


def put(client, text, name="book.txt"):
    data = text if isinstance(text, bytes) else text.encode()
    return client.files.create(file=(name, data), purpose="user_data")


def read(client, text):
    made = put(client, text)
    until(lambda: client.files.retrieve(made.id).status == "processed")
    return client.files.retrieve(made.id)


def about(*names, question=QUESTION):
    parts = [{"type": "file", "file": {"file_id": one}} for one in names]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


@contextmanager
def slowed(server, seconds=0.02):
    server.passes.before = lambda columns: time.sleep(seconds)
    try:
        yield
    finally:
        server.passes.before = lambda columns: None


def test_a_document_is_answered_from_where_it_was_read(library, anna):
    book = read(anna, BOOK)
    assert (book.object, book.filename, book.bytes) == ("file", "book.txt", len(BOOK))
    assert book.hillinfer["tokens"] == book.hillinfer["tokens_done"] > len(BOOK)
    answer = library.ask(about(book.id), anna)
    assert len(BOOK) - 64 < cached(answer) <= len(BOOK) + 4
    pasted = library.ask(f"{BOOK}\n\n{QUESTION}", anna)
    assert pasted.choices[0].message.content == answer.choices[0].message.content
    assert pasted.usage.prompt_tokens == answer.usage.prompt_tokens
    other = library.ask(about(book.id, question="999 (((((("), anna)
    assert cached(other) >= cached(answer) - 64
    assert other.choices[0].message.content != answer.choices[0].message.content


def test_files_are_listed_and_given_back(library, anna):
    one, two = put(anna, BOOK[:400], "one"), put(anna, BOOK[:500], "two")
    assert {file.id for file in anna.files.list()} == {one.id, two.id}
    assert anna.files.content(one.id).text == BOOK[:400]
    assert anna.files.delete(one.id).deleted
    assert [file.id for file in anna.files.list()] == [two.id]
    for ask in (anna.files.retrieve, anna.files.content, anna.files.delete):
        with pytest.raises(openai.NotFoundError) as gone:
            ask(one.id)
        assert gone.value.code == "file_not_found"


def test_progress_and_no_answer_before_its_end(library, anna):
    with slowed(library):
        made = put(anna, f"p{BOOK}")
        until(lambda: anna.files.retrieve(made.id).hillinfer["tokens_done"] >= CHUNK)
        told = anna.files.retrieve(made.id)
        assert told.status == "uploaded"
        assert 0 < told.hillinfer["tokens_done"] < told.hillinfer["tokens"]
        with pytest.raises(openai.ConflictError) as early:
            library.ask(about(made.id), anna)
        assert early.value.code == "file_processing"
        metrics = HTTP.get(
            f"{library.url}/metrics", headers={"authorization": f"Bearer {KEYS[0]}"}
        ).text
        assert 'hillinfer_documents{state="uploaded"} 1.0' in metrics
    until(lambda: anna.files.retrieve(made.id).status == "processed")
    assert library.ask(about(made.id), anna).choices


def test_who_asks_does_not_wait_for_a_document(library, anna):
    """Also where one sequence is open at a time."""
    with slowed(library):
        made = put(anna, BOOK[::-1])
        until(lambda: anna.files.retrieve(made.id).hillinfer["tokens_done"] >= CHUNK)
        assert library.ask("the cat", anna, max_tokens=3).usage.completion_tokens == 3
        assert anna.files.retrieve(made.id).status == "uploaded"
    until(lambda: anna.files.retrieve(made.id).status == "processed")


def test_a_file_that_is_deleted_is_read_no_further(library, anna):
    with slowed(library):
        made = put(anna, "x" + BOOK)
        until(lambda: anna.files.retrieve(made.id).hillinfer["tokens_done"] >= CHUNK)
        begun = library.passes.count
        anna.files.delete(made.id)
        until(lambda: library.inference.is_idle)
    assert library.passes.count <= begun + 2


def test_nobody_has_files_of_another_key(library, anna):
    made = read(anna, BOOK)
    with library.client(KEYS[1]) as bert:
        assert list(bert.files.list()) == []
        for ask in (
            bert.files.retrieve,
            bert.files.content,
            bert.files.delete,
            lambda name: library.ask(about(name), bert),
        ):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
    assert anna.files.retrieve(made.id).id == made.id


@pytest.mark.parametrize(
    ("data", "code", "status"),
    [
        (b"\xff\xfe", "unsupported_file", 400),
        (b"", "unsupported_file", 400),
        (b" \n", "unsupported_file", 400),
        (b"a\x00b", "unsupported_file", 400),
        (b"cat " * 1100, "context_length_exceeded", 400),
        (b"a" * 100, None, 200),
    ],
)
def test_what_is_no_document(library, anna, data, code, status):
    if code is None:
        assert put(anna, data).id
        return
    with pytest.raises(openai.APIStatusError) as refused:
        put(anna, data)
    assert (refused.value.status_code, refused.value.code) == (status, code)
    assert list(anna.files.list()) == []


def test_a_name_that_no_answer_can_tell_is_refused(library, anna):
    """The client says how its names are encoded."""
    part = b"--XX\r\nContent-Disposition: form-data; name="
    body = part + b'"purpose"\r\n\r\nuser_data\r\n'
    body += part + b'"file"; filename="a\\ud800.txt"\r\n\r\nthe cat\r\n--XX--\r\n'
    sent = {"authorization": f"Bearer {KEYS[0]}"}
    for encoding, status in (("unicode_escape", 400), ("utf-8", 200)):
        kind = {"content-type": f"multipart/form-data; boundary=XX; charset={encoding}"}
        told = HTTP.post(f"{library.url}/v1/files", content=body, headers=sent | kind)
        assert told.status_code == status, told.text
        assert HTTP.get(f"{library.url}/v1/files", headers=sent).status_code == 200


def test_no_more_files_than_there_is_room_for(library, anna):
    for _ in range(3):
        put(anna, BOOK[:900] * 2)
    with pytest.raises(openai.APIStatusError) as full:
        put(anna, BOOK[:900] * 2)
    assert (full.value.status_code, full.value.code) == (413, "files_full")


@pytest.mark.parametrize(
    "sent",
    [
        {"json": {"purpose": "user_data"}},
        {"data": {"purpose": "user_data"}, "files": {"other": b"a"}},
        {"data": {"purpose": "fine-tune"}, "files": {"file": b"a"}},
        {"files": {"file": b"a"}},
        {"content": b"--x\r\nnothing", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=y"}},
    ],
)
def test_forms_that_are_none(library, sent):
    headers = sent.pop("headers", {}) | {"authorization": f"Bearer {KEYS[0]}"}
    answer = HTTP.post(f"{library.url}/v1/files", headers=headers, **sent)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("part", [{}, {"file_id": 5}, {"file_data": "data:,x"}])
def test_parts_that_name_no_file(library, anna, part):
    with pytest.raises(openai.BadRequestError):
        library.ask([{"role": "user", "content": [{"type": "file", "file": part}]}], anna)


def test_kept_files_are_there_after_a_restart(endless_folder, cold_dir, tmp_path):
    """Read ones are found in the store, and what a killed server left half is read to its end."""
    files, rules = tmp_path / "files", {"files": tmp_path / "files"}
    with (
        with_store(endless_folder, cold_dir, tmp_path / "store", **rules) as server,
        server.client() as client,
    ):
        whole = read(client, BOOK)
        first = server.ask(about(whole.id), client)
        with slowed(server, 0.05):
            half = put(client, "b" + BOOK)
            until(lambda: client.files.retrieve(half.id).hillinfer["tokens_done"] >= CHUNK)
            server.server.end()
            server.server.end()
            until(lambda: server.inference.has_ended)
    kept = list(files.iterdir())
    assert {one.stem for one in kept} == {whole.id, half.id}
    # Nobody else of the machine reads them.
    assert all(one.stat().st_mode & 0o77 == 0 for one in kept)
    (files / "file-0123456789abcdef01234567.json").write_text("{")
    with (
        with_store(endless_folder, cold_dir, tmp_path / "store", **rules) as server,
        server.client() as client,
    ):
        until(lambda: {one.id for one in client.files.list()} == {whole.id, half.id})
        until(lambda: all(one.status == "processed" for one in client.files.list()))
        again = server.ask(about(whole.id), client)
        assert cached(again) >= cached(first)
        assert again.choices[0].message.content == first.choices[0].message.content
        assert cached(server.ask(about(half.id), client)) > 64
        client.files.delete(half.id)
    assert half.id not in {one.stem for one in files.iterdir()}


def test_a_file_that_is_deleted_while_it_is_written_does_not_stay(
    endless_folder, cold_dir, tmp_path
):
    class HeldUp(DriveCalls):
        """Holds the renaming of files of clients up."""

        def __init__(self):
            super().__init__()
            self.begun, self.may = threading.Event(), threading.Event()

        def rename(self, source, target):
            if "file-" in str(target):
                self.begun.set()
                assert self.may.wait(30)
            return super().rename(source, target)

    calls, refused = HeldUp(), []

    def put_one(client):
        with pytest.raises(openai.NotFoundError) as raised:
            put(client, BOOK)
        refused.append(raised.value.code)

    rules = {"files": tmp_path / "files", "calls": calls}
    with (
        with_store(endless_folder, cold_dir, tmp_path / "store", **rules) as server,
        server.client() as client,
    ):
        putting = threading.Thread(target=put_one, args=(client,))
        putting.start()
        assert calls.begun.wait(30)
        (one,) = client.files.list()
        client.files.delete(one.id)
        calls.may.set()
        putting.join()
        assert refused == ["file_not_found"]
        assert list((tmp_path / "files").iterdir()) == []
        # Nor is it read: what comes after it is the first that is.
        other = read(client, BOOK)
        assert [one.id for one in client.files.list()] == [other.id]
        assert len(server.logged("answered")) == 1
    assert [one.stem for one in (tmp_path / "files").iterdir()] == [other.id]


class NamesToKeep(DriveCalls):
    """Knows which names of a directory of files may be others after a power failure."""

    def __init__(self, refuses=False):
        super().__init__()
        self.open_names, self.directories, self.refuses = set(), set(), refuses

    def open(self, path, flags, mode=0o600):
        descriptor = super().open(path, flags, mode)
        if path.name == "files":
            self.directories.add(descriptor)
        return descriptor

    def close(self, descriptor):
        self.directories.discard(descriptor)
        super().close(descriptor)

    def fsync(self, descriptor):
        if descriptor in self.directories:
            if self.refuses:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.open_names.clear()
        super().fsync(descriptor)

    def rename(self, source, target):
        super().rename(source, target)
        if target.parent.name == "files":
            self.open_names.add(target.name)

    def unlink(self, path):
        super().unlink(path)
        if path.parent.name == "files":
            self.open_names.add(path.name)


def test_what_clients_are_told_of_kept_files_outlasts_a_power_failure(
    endless_folder, cold_dir, tmp_path
):
    calls = NamesToKeep()
    with (
        running(endless_folder, cold_dir, files=tmp_path / "files", calls=calls) as server,
        server.client() as client,
    ):
        made = put(client, BOOK)
        assert [one.stem for one in (tmp_path / "files").iterdir()] == [made.id]
        assert not calls.open_names
        client.files.delete(made.id)
        assert not list((tmp_path / "files").iterdir())
        assert not calls.open_names
        calls.refuses = True
        with pytest.raises(openai.InternalServerError) as refused:
            put(client, BOOK)
        assert refused.value.code == "drive_failed"
        # Whoever is told so does not find it after a restart.
        assert not list((tmp_path / "files").iterdir())
        assert not client.files.list().data


def test_texts_of_kept_files_lie_in_the_directory_alone(endless_folder, cold_dir, tmp_path):
    with (
        running(endless_folder, cold_dir, files=tmp_path / "files") as server,
        server.client() as client,
    ):
        made = put(client, BOOK)
        assert client.files.content(made.id).text == BOOK
        (tmp_path / "files" / f"{made.id}.json").unlink()
        with pytest.raises(openai.InternalServerError) as refused:
            client.files.content(made.id)
        assert refused.value.code == "drive_failed"
        assert [one.id for one in client.files.list()] == [made.id]


def test_without_a_store_a_file_is_read_with_each_question(endless_folder, cold_dir):
    with running(endless_folder, cold_dir) as server, server.client() as client:
        made = put(client, BOOK)
        assert made.status == "processed"
        answers = [server.ask(about(made.id), client) for _ in range(2)]
    assert [cached(one) for one in answers] == [0, 0]
    assert answers[0].usage.prompt_tokens > len(BOOK)
