# SPDX-License-Identifier: Apache-2.0
"""Checks of every request before its route: id, host name, origin, API key and size."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from hillinfer.serve.http.telemetry import Log
from hillinfer.serve.refusals import ApiError, api_error
from hillinfer.serve.rules import (
    ServerRules,
    bounded,
    is_of_other_place,
    names_this_machine,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_Made = TypeVar("_Made")

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Whoever looks after a server asks for these, and they tell nothing of requests. A page sends no
# key before it is there.
OPEN_PATHS = frozenset({"/health", "/"})
_STATE = "hillinfer"
_MOST_PATH = 200
# A body that does not come holds a connection for so long.
BODY_SECONDS = 60.0
# Beside those that wait and those that are worked on: who asks for metrics, models and files.
_MORE_REQUESTS = 256
_RETRY_SECONDS = 5


@dataclass
class Visit:
    """One request as the gate lets it in.

    Parameters
    ----------
    name
        Told in the header `X-Request-Id` and in the log.
    tenant
        Of its key.
    notes
        What the log's line has of it beside that.
    """

    name: str
    tenant: bytes = b""
    notes: dict[str, object] = field(default_factory=dict)


def visit_of(scope: Scope) -> Visit:
    """Return what the gate noted of a request."""
    visit: Visit = scope["state"][_STATE]
    return visit


class Gate:
    """Lets requests in to an application of ASGI, and logs each when it has ended.

    Parameters
    ----------
    app
        What answers.
    rules
        Of the server.
    log
        Gets a line for each request.

    Attributes
    ----------
    inside
        Requests that are let in and not answered to their end.
    """

    def __init__(self, app: App, rules: ServerRules, log: Log) -> None:
        self._app, self._rules, self._log = app, rules, log
        self._most = rules.queue + rules.parallel + _MORE_REQUESTS
        self.inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _headers(scope)
        given = headers.get("x-request-id", "")
        visit = Visit(given if _NAME.fullmatch(given) else secrets.token_hex(8))
        scope.setdefault("state", {})[_STATE] = visit
        began, status = time.monotonic(), 0
        self.inside += 1

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", visit.name.encode())]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            try:
                self._check(scope["path"], headers, visit)
                await self._app(scope, self._bounded(receive, headers), named)
            except Exception as error:
                if not isinstance(error, ApiError):
                    self._log.failure("failed", error, {"request": visit.name})
                if not status:
                    await refuse(api_error(error), named)
        finally:
            self.inside -= 1
            told = {
                "request": visit.name,
                "method": scope["method"],
                "path": scope["path"][:_MOST_PATH],
                "status": status or None,
                "seconds": round(time.monotonic() - began, 4),
            }
            self._log.line("request", told | visit.notes)

    def _check(self, path: str, headers: dict[str, str], visit: Visit) -> None:
        """Refuse whoever may not come in."""
        if path in OPEN_PATHS:
            return
        if self.inside > self._most:
            raise ApiError(
                429,
                f"{self._most} requests are here, and this server lets no more in: try again later",
                "too_many_requests",
                "rate_limit_error",
                retry_after=_RETRY_SECONDS,
            )
        self._check_origin(headers)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        tenant = self._rules.keys.tenant(key.strip() if scheme.lower() == "bearer" else None)
        if tenant is None:
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                "invalid_api_key",
            )
        visit.tenant = tenant

    def _check_origin(self, headers: dict[str, str]) -> None:
        """Keep pages of other places from using a server through a browser on this machine."""
        host = headers.get("host", "")
        if self._rules.is_local and not self._rules.keys and not names_this_machine(host):
            # A page's own name that was made to lead here.
            raise ApiError(403, "this server is for its own machine alone", "forbidden_host")
        if is_of_other_place(headers.get("origin"), host):
            raise ApiError(403, "pages of other places may not use this server", "forbidden_origin")

    def _bounded(self, receive: Receive, headers: dict[str, str]) -> Receive:
        """Return what gives a body no larger than allowed."""
        most, length = self._rules.body_bytes, headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 20 or int(length) > most):
            raise self._too_large()
        return bounded(receive, most, self._too_large)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._rules.body_limit}", "request_too_large"
        )


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def late() -> ApiError:
    """Return the refusal of a request whose body does not come."""
    return ApiError(408, "the body did not come", "request_timeout")


async def refuse(error: ApiError, send: Send) -> None:
    """Answer with an error."""
    body = json.dumps(error.as_json()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# --- Work of which little is done at once ---


class FewAtOnce:
    """Lets threads do a kind of work that takes long, so many at once; others wait in turn.

    Others of the pool's threads stay free for what takes no time.

    Parameters
    ----------
    most
        At once.
    most_waiting
        Who comes beyond these is refused.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self._turns, self._most = asyncio.Semaphore(most), most + most_waiting
        self.inside = 0

    async def do(self, act: Callable[[], _Made]) -> _Made:
        """Return what an act makes, in a thread.

        Raises
        ------
        ApiError
            Where too many wait; beside what the act raises.
        """
        if self.inside >= self._most:
            raise ApiError(
                429,
                "too many requests wait for their formats to be made ready: try again later",
                "too_many_requests",
                "rate_limit_error",
                retry_after=_RETRY_SECONDS,
            )
        self.inside += 1
        try:
            async with self._turns:
                return await run_in_threadpool(act)
        finally:
            self.inside -= 1
