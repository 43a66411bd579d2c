# SPDX-License-Identifier: Apache-2.0
"""Many streams and documents for long, with kills and a drive that is full: nothing is lost."""

from __future__ import annotations

import json
import random
import resource
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from hillinfer_bench.serving.server_log import Holdings, await_quiet, metrics
from hillinfer_bench.serving.servers import RunningServer

_STREAMS, _TOKENS = 16, 8
# What the drive takes no more of, while it is full: files of more than a page.
_FULL_BYTES = 4096
_FULL_SECONDS, _LOOK_SECONDS = 10.0, 1.0
_READING_SECONDS = 900.0

Say = Callable[[str], None]
Start = Callable[[], AbstractContextManager[RunningServer]]


@dataclass
class SoakRow:
    """What came of it.

    Parameters
    ----------
    seconds
        Of load, kills and full drives included.
    answered
        Requests that had an answer.
    kills, full_drives
        How often the server was killed, and its files kept from growing.
    statuses
        How many requests had which status, where it was not 200; `gone` where the server was.
    budget_bytes, most_dram_bytes
        M0, and the most that its parts took by their peaks.
    resident_bytes
        Memory of the process' own at each look.
    holdings
        Behind the first round without load, and behind the last.
    documents, differing, unanswered
        Files that were processed; those whose answer in the end has other tokens than in the
        beginning, and those that had none.
    """

    seconds: float = 0.0
    answered: int = 0
    kills: int = 0
    full_drives: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    budget_bytes: float = 0.0
    most_dram_bytes: float = 0.0
    resident_bytes: list[int] = field(default_factory=list)
    holdings: list[Holdings] = field(default_factory=list)
    documents: int = 0
    differing: int = 0
    unanswered: int = 0


class _Load:
    """Streams of questions, which go on whatever becomes of the server."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.server: RunningServer | None = None
        self.answered = 0
        self.statuses: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), name=f"soak-{number}")
            for number in range(_STREAMS)
        ]

    def __enter__(self) -> _Load:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for one in self._threads:
            one.join()

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        while not self._ended.is_set():
            server = self.server
            if server is None:
                time.sleep(0.1)
                continue
            status, _ = about(server, draw.choice(self._names), f"question {draw.random()}")
            with self._lock:
                if status == "200":
                    self.answered += 1
                else:
                    self.statuses[status] += 1
            if status != "200":
                # Whoever is refused tries later, as a client does.
                self._ended.wait(0.5)


def measure_soak(
    start: Start, texts: Sequence[str], seconds: float, kill_seconds: float, say: Say
) -> SoakRow:
    """Upload documents, ask about them, kill the server and fill its drive, and ask again.

    Parameters
    ----------
    start
        Starts a server on the same store and files each time; its answers have the bits of
        reading everything.
    texts
        A document each.
    seconds
        How long the load lasts.
    kill_seconds
        From one kill to the next; the drive is full in the middle between them.
    say
        Takes a line of progress.
    """
    row = SoakRow()
    with start() as server:
        names = [_upload(server, text) for text in texts]
        say(f"{len(names)} documents are read")
        first = {name: about(server, name, "what is this?")[1] for name in names}
        row.documents = len(names)
        await_quiet(server)
        row.holdings.append(Holdings.of(server))
        # The server goes as one that is killed does.
        server.process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    with _Load(names) as load:
        while time.monotonic() - began < seconds:
            with start() as server:
                load.server = server
                _watched(server, row, kill_seconds, began + seconds)
                load.server = None
                if time.monotonic() - began < seconds:
                    server.process.send_signal(signal.SIGKILL)
                    server.process.wait()
                    row.kills += 1
            say(f"{time.monotonic() - began:.0f} s, {load.answered} answers, {row.kills} kills")
    row.seconds = time.monotonic() - began
    row.answered, row.statuses = load.answered, dict(load.statuses)
    with start() as server:
        for name in names:
            status, text = _when_read(server, name)
            if status != "200":
                row.unanswered += 1
            elif text != first[name]:
                row.differing += 1
        await_quiet(server)
        row.holdings.append(Holdings.of(server))
    return row


def about(server: RunningServer, name: str, question: str) -> tuple[str, str]:
    """Return the status and the greedy answer to a question about a file."""
    parts = [{"type": "file", "file": {"file_id": name}}, {"type": "text", "text": question}]
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": _TOKENS,
        "temperature": 0,
        **server.fields,
    }
    asked = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=600) as answer:
            told = json.load(answer)
        return "200", told["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return str(error.code), ""
    except (OSError, ValueError):
        return "gone", ""


def _watched(server: RunningServer, row: SoakRow, kill_seconds: float, end: float) -> None:
    """Look at a server until it is to be killed; its drive is full for a while in the middle."""
    began = time.monotonic()
    until = min(began + kill_seconds, end)
    full_from = began + kill_seconds / 2
    full_until, is_full = full_from + min(_FULL_SECONDS, kill_seconds / 4), False
    while time.monotonic() < until and server.process.poll() is None:
        now = time.monotonic()
        wanted = full_from <= now < full_until
        if wanted != is_full:
            is_full = wanted
            row.full_drives += wanted
            most = _FULL_BYTES if wanted else resource.RLIM_INFINITY
            resource.prlimit(
                server.process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY)
            )
        with suppress(OSError, ValueError, KeyError):
            told = metrics(server)
            row.budget_bytes = told["hillinfer_dram_budget_bytes"]
            row.most_dram_bytes = max(row.most_dram_bytes, told["hillinfer_dram_bytes"])
            row.resident_bytes.append(Holdings.of(server).resident_bytes)
        time.sleep(_LOOK_SECONDS)


def _upload(server: RunningServer, text: str) -> str:
    """Send a document, and return its name once it is read."""
    border = "border-of-the-form"
    head = 'Content-Disposition: form-data; name="{}"{}\r\n\r\n'
    body = (
        f"--{border}\r\n{head.format('purpose', '')}user_data\r\n--{border}\r\n"
        f"{head.format('file', '; filename=book.txt')}{text}\r\n--{border}--\r\n"
    )
    asked = urllib.request.Request(
        f"{server.url}/v1/files",
        body.encode(),
        {"Content-Type": f"multipart/form-data; boundary={border}"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        name = str(json.load(answer)["id"])
    _await_read(server, name)
    return name


def _await_read(server: RunningServer, name: str) -> dict[str, Any]:
    until = time.monotonic() + _READING_SECONDS
    while True:
        with urllib.request.urlopen(f"{server.url}/v1/files/{name}", timeout=60) as answer:
            told: dict[str, Any] = json.load(answer)
        if told["status"] != "uploaded" or time.monotonic() > until:
            return told
        time.sleep(0.05)


def _when_read(server: RunningServer, name: str) -> tuple[str, str]:
    """Ask about a file once the server has read it on."""
    with suppress(OSError, ValueError, KeyError):
        _await_read(server, name)
    return about(server, name, "what is this?")
