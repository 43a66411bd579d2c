# SPDX-License-Identifier: Apache-2.0
"""What a stream sends when: comments come with what follows, or alone where nothing does."""

import asyncio
import time
from types import SimpleNamespace

from servers import HTTP, running

from hillinfer.serve.answers import Piece
from hillinfer.serve.http.streams import AnswerStream, Mailbox
from hillinfer.serve.jobs import Done, ReadSoFar, Usage

PROGRESS = [ReadSoFar(done, 20, 0) for done in (0, 20)]
PIECES = [Piece(0, "ab"), Piece(0, "", finish="length")]
DONE = Done(Usage(20, 0, 2, 0.0, 0.1, 0.2))


class Wire:
    """Tells the text of a piece, and the end."""

    def first(self, choice):
        return {"first": choice}

    def chunk(self, piece):
        return [{"text": piece.text}] if piece.text else []


def sent(events, later=(), ping_seconds=60.0):
    """Return what a stream sends, one by one: the later events come behind its first bytes."""

    async def run():
        mailbox, bodies = Mailbox(), []
        for event in events:
            mailbox.put(event)

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            if body := message.get("body"):
                if not bodies:
                    for event in later:
                        mailbox.put(event)
                bodies.append(body)

        stream = AnswerStream(
            SimpleNamespace(cancel=lambda: None),
            mailbox,
            Wire(),
            told_usage=False,
            ping_seconds=ping_seconds,
            on_gone=lambda: None,
        )
        await stream({}, receive, send)
        return bodies

    return asyncio.run(run())


def stripping_client(bodies):
    """Return events as a client reads them that strips whatever arrives, as vLLM's does."""
    buffer, events = "", []
    for body in bodies:
        buffer += body.decode().strip()
        *whole, buffer = buffer.split("\n\n")
        if buffer.startswith("data: "):
            whole, buffer = [*whole, buffer], ""
        events += [one for one in whole if one.startswith("data: ")]
    return events


def test_a_comment_comes_with_what_follows_it():
    bodies = sent([*PROGRESS, *PIECES, DONE])
    assert bodies[0].count(b": progress") == 2
    assert b"data: " in bodies[0]
    assert stripping_client(bodies) == ['data: {"first":0}', 'data: {"text":"ab"}', "data: [DONE]"]
    # The twin: of comments that arrive alone it loses what is behind.
    apart = [part + b"\n\n" for part in b"".join(bodies).split(b"\n\n") if part]
    assert stripping_client(apart) != stripping_client(bodies)


def test_a_comment_behind_which_nothing_comes_is_sent():
    bodies = sent(PROGRESS, later=[*PIECES, DONE], ping_seconds=0.05)
    assert bodies[0].count(b": progress") == 2
    assert b"data: " not in bodies[0]
    assert bodies[-1] == b"data: [DONE]\n\n"
    # Whoever strips what arrives finds all that is behind it.
    assert stripping_client(bodies) == ['data: {"first":0}', 'data: {"text":"ab"}', "data: [DONE]"]
    # The twin: where the comment is whole, it does not.
    whole = [bodies[0].removesuffix(b":"), bodies[1].removeprefix(b" and\n\n"), *bodies[2:]]
    assert stripping_client(whole) != stripping_client(bodies)


def arrived(server, **asked):
    """Return the lines of a stream, each with how many passes the model had begun."""
    body = {"model": "tiny", "stream": True, "temperature": 0, **asked}
    before = server.passes.count
    with HTTP.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        return [(line, server.passes.count - before) for line in answer.iter_lines() if line]


def test_progress_that_comes_often_is_told_while_a_prompt_is_read(endless_folder, cold_dir):
    messages = [{"role": "user", "content": "a cat " * 110}]
    with running(endless_folder, cold_dir) as server:
        server.passes.before = lambda columns: time.sleep(0.1)
        lines = arrived(server, messages=messages, max_tokens=2)
    told = [passes for line, passes in lines if line.startswith(": progress")]
    (begun,) = [passes for line, passes in lines if '"role"' in line]
    assert len(told) > 9
    # The first of them comes within some passes, and the answer behind all.
    assert told[0] <= 7 < 10 <= begun


def test_a_stream_pings_while_a_call_is_made(byte_folder, cold_dir):
    letters = {"type": "string", "minLength": 30, "maxLength": 30}
    inner = {"type": "object", "properties": {"text": letters}, "required": ["text"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": inner}}]
    messages = [{"role": "user", "content": "hi"}]
    with running(byte_folder, cold_dir, ping_seconds=0.3) as server:
        server.passes.before = lambda columns: time.sleep(0.05)
        asked = {"tools": tools, "tool_choice": "required", "max_tokens": 200}
        lines = [line for line, _ in arrived(server, messages=messages, **asked)]
    (head,) = [place for place, line in enumerate(lines) if '"role"' in line]
    (call,) = [place for place, line in enumerate(lines) if '"tool_calls":' in line]
    pings = [line for line in lines[head:call] if line.startswith(": ping")]
    assert len(pings) >= 3
