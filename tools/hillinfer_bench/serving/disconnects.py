# SPDX-License-Identifier: Apache-2.0
"""Clients that leave at random moments: their work ends within one turn of the server."""

from __future__ import annotations

import itertools
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hillinfer_bench.serving.server_log import Holdings, await_quiet, lines, moment
from hillinfer_bench.serving.servers import RunningServer
from hillinfer_bench.serving.streams import Client

_AT_ONCE = 8
_CALIBRATIONS = 3
# Whoever waits for a socket's end, writes a line or asks for the time shares two cores with it.
_SLACK_SECONDS = 0.05

Say = Callable[[str], None]


@dataclass(frozen=True)
class DisconnectsRow:
    """Requests whose clients left.

    Parameters
    ----------
    asked
        How many.
    cancelled_seconds
        From a client's leaving to its request's end, of those that were worked on then.
    turn_seconds
        The longest turn of the server under the same load, without anybody leaving: as long as a
        forward pass over a chunk and one of a step take.
    before, after
        What the process held before and behind all of them.
    """

    asked: int
    cancelled_seconds: list[float]
    turn_seconds: float
    before: Holdings
    after: Holdings

    @property
    def late(self) -> int:
        """How many ended later than a turn after their client left."""
        return sum(one > self.turn_seconds + _SLACK_SECONDS for one in self.cancelled_seconds)

    @property
    def leaked(self) -> int:
        """Threads and files that are there and were not before."""
        grown = (
            self.after.threads - self.before.threads,
            self.after.files - self.before.files,
        )
        return sum(max(0, one) for one in grown)


def measure_disconnects(
    server: RunningServer,
    client: Client,
    prompts: Sequence[str],
    new_tokens: int,
    count: int,
    say: Say,
) -> DisconnectsRow:
    """Ask and leave, eight at once, half of them in streams.

    Parameters
    ----------
    server, client
        Who is asked.
    prompts
        Stored ones; half of the requests have one of them with another word before it, so that it
        is read.
    new_tokens
        Of each answer, had its client stayed.
    count
        How many clients leave.
    say
        Takes a line of progress.
    """
    assert server.log is not None
    turn, whole = _calibrated(client, prompts, new_tokens)
    await_quiet(server)
    before = Holdings.of(server)
    left: dict[str, float] = {}
    numbers = iter(range(count))
    lock = threading.Lock()

    def leave() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            draw = random.Random(number)
            prompt = prompts[number % len(prompts)]
            if draw.random() < 0.5:
                prompt = f"{number} {prompt}"
            name = f"left-{number}"
            at = _ask_and_leave(server, name, prompt, new_tokens, draw, draw.uniform(0, whole))
            with lock:
                left[name] = at
                if len(left) % 100 == 0:
                    say(f"{len(left)} clients have left")

    threads = [threading.Thread(target=leave, name=f"leaving-{one}") for one in range(_AT_ONCE)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    await_quiet(server)
    # Sockets of clients that are gone are let go behind their requests.
    time.sleep(1)
    told = [*lines(server.log)]
    asked = [one for one in told if one["event"] == "request" and "work" in one]
    work = {one["work"]: one["request"] for one in asked}
    ended = [
        moment(one) - left[work[one["work"]]]
        for one in told
        if one.get("finish") == "cancelled" and work.get(one["work"]) in left
    ]
    return DisconnectsRow(count, ended, turn, before, Holdings.of(server))


def _calibrated(client: Client, prompts: Sequence[str], new_tokens: int) -> tuple[float, float]:
    """Return the longest turn of the server, and how long a request takes under this load."""
    gaps, wholes = [0.0], [0.0]
    for number in range(_CALIBRATIONS):
        fresh = f"calibration {number} {prompts[0]}"
        burst = client.ask_together([*prompts[: _AT_ONCE - 1], fresh], new_tokens)
        for answer in burst.answers:
            gaps += [after - one for one, after in itertools.pairwise(answer.texts)]
            wholes.append(answer.last - answer.began)
    return max(gaps), max(wholes)


def _ask_and_leave(
    server: RunningServer,
    name: str,
    prompt: str,
    new_tokens: int,
    draw: random.Random,
    seconds: float,
) -> float:
    """Return when the client left, in seconds since 1970."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": draw.random() < 0.5,
        **server.fields,
    }
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nX-Request-Id: {name}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(seconds)
        if draw.random() < 0.5:
            # Without a farewell: as a process that was killed.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return time.time()
