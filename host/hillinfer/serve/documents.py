# SPDX-License-Identifier: Apache-2.0
"""Files that clients send: read ahead into the store, and named in messages afterwards."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import keep_names
from hillinfer.errors import FULL, Failure, SettingsError, reason_of
from hillinfer.generate.tokens import Sampling
from hillinfer.serve.inference import Inference
from hillinfer.serve.jobs import Done, Event, Failed, Job, ReadSoFar
from hillinfer.serve.refusals import SERVER, ApiError, api_error
from hillinfer.serve.requests import AnswerWishes
from hillinfer.serve.rules import ServerRules
from hillinfer.values import format_bytes

_NAME = re.compile(r"file-[0-9a-f]{24}")
_MOST_NAME = 255
# A day, for a job that nobody waits for.
_READING_SECONDS = 86400.0
# A document comes before its question, with this between them, as in `hillinfer generate`.
SEPARATOR = "\n\n"
_ONE_TOKEN = AnswerWishes(
    sampling=Sampling(),
    most_tokens=1,
    stops=(),
    choices=1,
    top=None,
    bias=(),
    presence=0.0,
    frequency=0.0,
    ends=True,
)


class FileState(StrEnum):
    """What OpenAI calls the status of a file."""

    READING = "uploaded"
    READ = "processed"
    FAILED = "error"


@dataclass(frozen=True)
class Document:
    """A file of a client.

    Parameters
    ----------
    name
        Its id.
    filename
        As the client has it.
    byte_count, created
        Its size, and when it came, in seconds since 1970.
    tenant
        Whose it is.
    state, reason
        How far it is, and why it failed.
    tokens, done
        Of the document, and how many of them are read; 0 before that is known.
    """

    name: str
    filename: str
    byte_count: int
    created: int
    tenant: bytes
    state: FileState = FileState.READING
    reason: str | None = None
    tokens: int = 0
    done: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's object, with what is read."""
        return {
            "id": self.name,
            "object": "file",
            "bytes": self.byte_count,
            "created_at": self.created,
            "filename": self.filename,
            "purpose": "user_data",
            "status": self.state.value,
            "status_details": self.reason,
            "hillinfer": {"tokens": self.tokens, "tokens_done": self.done},
        }


class Documents:
    """The files of all clients; any thread may use it.

    Parameters
    ----------
    inference
        Reads them, beside requests.
    rules
        Of the server.
    calls
        How files that are kept reach the drive; the operating system itself where None.
    """

    def __init__(
        self, inference: Inference, rules: ServerRules, calls: DriveCalls | None = None
    ) -> None:
        self._inference, self._rules = inference, rules
        self._lock = threading.Lock()
        self._known: dict[str, Document] = {}
        self._texts: dict[str, str] = {}
        self._jobs: dict[str, Job] = {}
        calls = calls or DriveCalls()
        self._kept = None if rules.files is None else _Kept(rules.files, calls)
        # Known before anybody can ask for one, and read once there is a model.
        for document in self._kept.read_all() if self._kept is not None else ():
            self._known[document.name] = document
        self._taken_up = list(self._known)

    # --- what clients ask ------------------------------------------------------------------

    def add(self, filename: str, data: bytes, tenant: bytes) -> Document:
        """Take a file, and begin to read it where there is a store.

        Raises
        ------
        ApiError
            Where it is no text, too long for the model, or there are too many.
        """
        text = _decoded(data)
        document = Document(
            f"file-{secrets.token_hex(12)}",
            filename[:_MOST_NAME],
            len(data),
            int(time.time()),
            tenant,
        )
        ids = self._ids(text)
        with self._lock:
            held, rules = sum(one.byte_count for one in self._known.values()), self._rules
            if held + len(data) > rules.files_bytes or len(self._known) >= rules.most_files:
                raise ApiError(
                    413,
                    f"{len(self._known)} files take {format_bytes(held)}, and "
                    f"{format_bytes(rules.files_bytes)} and {rules.most_files} files is the most "
                    "here: delete some",
                    "files_full",
                )
            self._known[document.name] = document
            if self._kept is None:
                self._texts[document.name] = text
        if self._kept is not None:
            try:
                self._kept.write(document, text)
            except OSError as error:
                self._forget(document.name)
                is_full = error.errno in FULL
                raise ApiError(
                    503,
                    f"the file cannot be kept: its drive {'is full' if is_full else 'failed'}",
                    "drive_full" if is_full else "drive_failed",
                    "server_error",
                ) from error
            if not self._is_known(document.name):
                # Whoever deleted it meanwhile found no file there yet.
                self._delete(document.name)
        try:
            self._read(document, ids)
        except ApiError:
            # The server ends.
            self.remove(document.name, tenant)
            raise
        return self.get(document.name, tenant)

    def get(self, name: str, tenant: bytes) -> Document:
        """Return a file; ApiError where this tenant has none of that name."""
        with self._lock:
            found = self._known.get(name)
        if found is None or found.tenant != tenant:
            raise _no_file()
        return found

    def of_tenant(self, tenant: bytes) -> list[Document]:
        """Return a tenant's files, newest first."""
        with self._lock:
            own = [one for one in self._known.values() if one.tenant == tenant]
        return sorted(own, key=lambda one: (one.created, one.name), reverse=True)

    def count(self) -> dict[str, int]:
        """Return how many files are in each state."""
        with self._lock:
            states = [one.state.value for one in self._known.values()]
        return {state.value: states.count(state.value) for state in FileState}

    def text(self, name: str, tenant: bytes) -> str:
        """Return the text of a file that is read.

        Raises
        ------
        ApiError
            Where this tenant has none of that name, it is still being read, or that failed.
        """
        document = self.get(name, tenant)
        if document.state is FileState.READING:
            raise ApiError(
                409,
                f"{document.done} of {document.tokens} tokens of the file are read: try later",
                "file_processing",
                param="file_id",
                retry_after=1,
            )
        if document.state is FileState.FAILED:
            raise ApiError(
                409,
                f"the file could not be read: {document.reason}",
                "file_failed",
                param="file_id",
            )
        return self.content(name, tenant)

    def content(self, name: str, tenant: bytes) -> str:
        """Return the text of a file, however far it is read."""
        self.get(name, tenant)
        return self._text(name)

    def remove(self, name: str, tenant: bytes) -> None:
        """Forget a file; what is being read of it ends within one forward pass.

        Raises
        ------
        ApiError
            Where this tenant has none of that name, or its drive does not let it go: it stays.
        """
        self.get(name, tenant)
        with self._lock:
            # Whoever cannot read it any more waits here, and finds that it is gone.
            self._delete(name)
            self._known.pop(name, None)
        self._forget(name)

    # --- the server's ----------------------------------------------------------------------

    def take_up(self) -> None:
        """Read the files that were kept, once the model is there."""
        for name in self._taken_up:
            with self._lock:
                document = self._known.get(name)
            if document is None:
                continue
            try:
                self._read(document, self._ids(self._text(name)))
            except Exception as error:
                self._change(name, state=FileState.FAILED, reason=_said(error))

    def stop(self) -> None:
        """Read no further."""
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()

    # --- inside ----------------------------------------------------------------------------

    def _text(self, name: str) -> str:
        """Return a file's text: where files are kept, none of them lies in memory."""
        if self._kept is None:
            with self._lock:
                if name not in self._texts:
                    # Deleted since it was looked for: nobody is answered as if it were empty.
                    raise _no_file()
                return self._texts[name]
        try:
            return self._kept.text(name)
        except (OSError, ValueError, KeyError) as error:
            if not self._is_known(name):
                raise _no_file() from error
            raise ApiError(
                503, "the file cannot be read back: its drive failed", "drive_failed", SERVER
            ) from error

    def _ids(self, text: str) -> list[int]:
        """Return the tokens that a prompt about a document begins with, but for the last ones."""
        served = self._inference.served
        ids = served.prompts.of_chat([{"role": "user", "content": text + SEPARATOR}])
        if len(ids) >= served.context_tokens:
            raise ApiError(
                400,
                f"the file has about {len(ids)} tokens, and prompt and answer have "
                f"{served.context_tokens} here: send parts of it",
                "context_length_exceeded",
            )
        return ids

    def _read(self, document: Document, ids: list[int]) -> None:
        if self._inference.served.store is None:
            # Nothing would be kept of it: it is read with each question.
            self._change(document.name, state=FileState.READ, tokens=len(ids), done=0)
            return
        self._change(document.name, tokens=len(ids))
        job = Job(
            prompt_ids=ids,
            wishes=_ONE_TOKEN,
            most_tokens=1,
            tenant=document.tenant,
            tell=partial(self._note, document.name),
            deadline=time.monotonic() + _READING_SECONDS,
            is_background=True,
        )
        with self._lock:
            if document.name not in self._known:
                # Deleted meanwhile: nobody would take what is read of it.
                return
            self._jobs[document.name] = job
        self._inference.submit(job)

    def _note(self, name: str, told: Event) -> None:
        """Take what the inference thread tells of a file that it reads."""
        if isinstance(told, ReadSoFar):
            self._change(name, done=told.done)
        elif isinstance(told, Done):
            self._change(name, state=FileState.READ)
        elif isinstance(told, Failed):
            self._change(name, state=FileState.FAILED, reason=told.error.message)

    def _change(self, name: str, **changes: Any) -> None:
        with self._lock:
            known = self._known.get(name)
            if known is not None:
                self._known[name] = replace(known, **changes)
            if changes.get("state") is not None:
                self._jobs.pop(name, None)

    def _is_known(self, name: str) -> bool:
        with self._lock:
            return name in self._known

    def _delete(self, name: str) -> None:
        """Delete a file that is kept: one that stayed would be back with the next server."""
        if self._kept is None:
            return
        try:
            self._kept.remove(name)
        except OSError as error:
            raise ApiError(
                503,
                f"the file cannot be deleted: {reason_of(error)}; delete it again",
                "drive_failed",
                SERVER,
            ) from error

    def _forget(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)
            self._texts.pop(name, None)
            job = self._jobs.pop(name, None)
        if job is not None:
            job.cancel()


def with_documents(
    messages: Sequence[Mapping[str, Any]],
    text_of: Callable[[str], str],
    check_letters: Callable[[int], None],
) -> list[Mapping[str, str]]:
    """Return messages with the texts of the files that they name, each before what follows it.

    `check_letters` is called before texts are joined: a short request may name a long file often.
    """
    made: list[Mapping[str, str]] = []
    letters = 0
    for one in messages:
        texts = [*(text_of(name) for name in one.get("files", ())), one["content"]]
        letters += sum(len(text) for text in texts)
        check_letters(letters)
        made.append({"role": one["role"], "content": SEPARATOR.join(texts)})
    return made


def _no_file() -> ApiError:
    said = "there is no file of that name here"
    return ApiError(404, said, "file_not_found", param="file_id")


def _decoded(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ApiError(
            400, "the file is not UTF-8 text", "unsupported_file", param="file"
        ) from error
    if not text.strip() or "\x00" in text:
        raise ApiError(400, "the file has no text", "unsupported_file", param="file")
    return text


def _said(error: Exception) -> str:
    return api_error(error).message if isinstance(error, ApiError) else Failure.of(error).message


# --- On a drive ---


class _Kept:
    """Files in a directory, each whole or not at all."""

    def __init__(self, directory: Path, calls: DriveCalls) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"cannot make the directory {directory}: {reason_of(error)}; check --files"
            ) from error
        self._directory, self._calls = directory, calls

    def write(self, document: Document, text: str) -> None:
        told = asdict(document) | {"tenant": document.tenant.hex(), "text": text}
        del told["state"], told["reason"], told["tokens"], told["done"]
        file = self._directory / f"{document.name}.json"
        part = file.with_suffix(".part")
        try:
            descriptor = self._calls.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                json.dump(told, opened)
                opened.flush()
                self._calls.fsync(descriptor)
            self._calls.rename(part, file)
            keep_names(self._directory, self._calls)
        except OSError:
            # Who is told that it is not kept does not find it after a restart.
            for one in (part, file):
                with suppress(OSError):
                    self._calls.unlink(one)
            raise

    def text(self, name: str) -> str:
        told = json.loads((self._directory / f"{name}.json").read_text(encoding="utf-8"))
        return str(told["text"])

    def read_all(self) -> list[Document]:
        found = []
        for part in self._directory.glob("file-*.part"):
            # Of a server that was killed.
            with suppress(OSError):
                self._calls.unlink(part)
        for file in sorted(self._directory.glob("file-*.json")):
            # What is damaged is as if it had not come.
            with suppress(OSError, ValueError, KeyError, TypeError):
                told = json.loads(file.read_text(encoding="utf-8"))
                del told["text"]
                document = Document(**told | {"tenant": bytes.fromhex(told["tenant"])})
                document.filename.encode()
                if _NAME.fullmatch(document.name) and file.stem == document.name:
                    found.append(document)
        return found

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._calls.unlink(self._directory / f"{name}.json")
        # Also of one that is gone: nobody knows whether that is on the drive.
        with suppress(FileNotFoundError):
            keep_names(self._directory, self._calls)
