# SPDX-License-Identifier: Apache-2.0
"""What a stream sends at once: comments come with what follows, or alone where nothing does."""

import asyncio
from types import SimpleNamespace

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
    assert b"".join(bodies).count(b": progress") == 2
    assert stripping_client(bodies) == ['data: {"first":0}', 'data: {"text":"ab"}', "data: [DONE]"]
    # The twin: of comments that arrive alone it loses what is behind.
    apart = [part + b"\n\n" for part in b"".join(bodies).split(b"\n\n") if part]
    assert stripping_client(apart) != stripping_client(bodies)


def test_a_comment_behind_which_nothing_comes_is_sent():
    bodies = sent(PROGRESS, later=[*PIECES, DONE], ping_seconds=0.05)
    assert bodies[0].count(b": progress") == 2
    assert b"data: " not in bodies[0]
    assert bodies[-1] == b"data: [DONE]\n\n"
