# SPDX-License-Identifier: Apache-2.0
"""Waits for a request's events beside its client: as a stream, or until all of it is there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from hillinfer.serve.answers import Piece
from hillinfer.serve.http.gate import Receive, Scope, Send
from hillinfer.serve.http.wire import LAST, Wire, comment, event
from hillinfer.serve.jobs import Done, Event, Failed, Job, ReadSoFar
from hillinfer.serve.refusals import gone_error

# How long a comment waits for what it can be sent with.
_HELD_SECONDS = 0.25
# Clients that strip what arrives lose the end of a comment that arrives alone, and all behind it:
# vLLM's load generator does. So another comment is begun with it, which ends with what comes next.
_BEGUN, _ENDED = b":", b" and\n\n"


class Mailbox:
    """Carries events from the inference thread to the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, told: Event) -> None:
        """Take an event, in any thread; RuntimeError where the loop is closed."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, told)

    async def get(self, seconds: float | None = None) -> Event | None:
        """Return the next event, None where none came in time."""
        try:
            return await asyncio.wait_for(self._events.get(), seconds)
        except TimeoutError:
            return None


class GoneError(Exception):
    """The client is gone."""


async def _gone(receive: Receive) -> None:
    """Return once the client is gone; whatever else it sends is nothing."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def beside_client(work: asyncio.Task[Any], job: Job, receive: Receive) -> Any:
    """Return what comes of work, unless the client leaves first.

    Raises
    ------
    GoneError
        Where it leaves; its request ends within one forward pass.
    """
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise GoneError
    finally:
        # Also where this request's own task is cancelled; of one that has ended it changes nothing.
        job.cancel()
        for task in (work, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def whole_answer(job: Job, mailbox: Mailbox, wire: Wire) -> dict[str, Any]:
    """Return the object of an answer that is not streamed.

    Raises
    ------
    ApiError
        Where it failed.
    """
    pieces: list[list[Piece]] = [[] for _ in range(job.wishes.choices)]
    while True:
        told = await mailbox.get()
        if isinstance(told, Piece):
            pieces[told.choice].append(told)
        elif isinstance(told, Failed):
            raise told.error
        elif isinstance(told, Done):
            return wire.whole(pieces, told.usage)


class AnswerStream(Response):
    """A response of ASGI that sends an answer as it comes.

    What fails before anything was sent is an error of HTTP; afterwards it is an event. A client
    that leaves ends its request within one forward pass.

    Parameters
    ----------
    job, mailbox, wire
        What is answered, where its events come, and how they are told.
    told_usage
        Whether usage is told at the end.
    ping_seconds
        How long nothing is sent at most.
    on_gone
        Called where the client leaves.
    """

    def __init__(
        self,
        job: Job,
        mailbox: Mailbox,
        wire: Wire,
        *,
        told_usage: bool,
        ping_seconds: float,
        on_gone: Callable[[], None],
    ) -> None:
        super().__init__()
        self._job, self._mailbox, self._wire = job, mailbox, wire
        self._told_usage, self._ping_seconds = told_usage, ping_seconds
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        # A request that waits says nothing for a while, and may still be refused as a whole.
        first = await self._first(receive)
        if isinstance(first, Failed):
            raise first.error
        work = asyncio.ensure_future(self._send(first, send))
        try:
            await beside_client(work, self._job, receive)
        except (GoneError, OSError):
            self._on_gone()

    async def _first(self, receive: Receive) -> Event | None:
        work = asyncio.ensure_future(self._mailbox.get(self._ping_seconds))
        gone = asyncio.ensure_future(_gone(receive))
        ended = False
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            ended = work.done()
            if ended:
                return work.result()
            self._on_gone()
            raise gone_error()
        finally:
            if not ended:
                self._job.cancel()
                work.cancel()
            gone.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await gone

    async def _send(self, first: Event | None, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        is_begun = False
        async for data in self._chunks(first):
            body = data
            if is_begun:
                body = data[len(_BEGUN) :] if data.startswith(_BEGUN) else _ENDED + data
            is_begun = b"data: " not in data
            body += _BEGUN if is_begun else b""
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _chunks(self, told: Event | None) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        held, due = b"", time.monotonic() + (0.0 if told is None else self._ping_seconds)
        while True:
            sent = b""
            if isinstance(told, ReadSoFar):
                if not held:
                    due = min(due, time.monotonic() + _HELD_SECONDS)
                held += comment("progress " + json.dumps(vars(told)))
            elif isinstance(told, Piece):
                if told.choice not in begun:
                    begun.add(told.choice)
                    head = self._wire.first(told.choice)
                    sent += b"" if head is None else event(head)
                sent += b"".join(map(event, self._wire.chunk(told)))
            elif isinstance(told, Failed):
                yield held + event(told.error.as_json())
                return
            elif isinstance(told, Done):
                if self._told_usage:
                    held += event(self._wire.usage(told.usage))
                yield held + LAST
                return
            # Also where the model goes on and nothing is told yet: of a call that is not whole.
            if sent or time.monotonic() >= due:
                yield held + sent or comment(f"ping {int(time.time())}")
                held, due = b"", time.monotonic() + self._ping_seconds
            told = await self._mailbox.get(due - time.monotonic())
