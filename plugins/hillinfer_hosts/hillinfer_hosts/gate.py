# SPDX-License-Identifier: Apache-2.0
"""What requests to a router or an agent pass first: where they are from, their key, their size."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from hillinfer.serve.rules import bounded, is_local, is_of_other_place, names_this_machine

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

_MOST_BODY_BYTES = 64 << 20


class SharedKey:
    """A key that all hosts have; empty where everybody may come, who reaches this machine.

    Parameters
    ----------
    key
        The key.
    """

    def __init__(self, key: str = "") -> None:
        self._told = f"Bearer {key}".encode() if key else b""

    def lets_in(self, request: Request) -> bool:
        """Return whether a request has it; takes as long for one that is nearly right."""
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        return not self._told or hmac.compare_digest(given, self._told)


class Door:
    """Keeps pages of other places out of an application, which a browser here could lead to it.

    Routers and agents of one machine need no key, and a page of the web reaches them through the
    browser of whoever works there. A replica behind a router sees neither the page's origin nor
    the name that it used, so this is looked at here.

    Parameters
    ----------
    app
        What answers.
    host
        The address that is listened at.
    """

    def __init__(self, app: _App, host: str) -> None:
        self._app, self._is_local = app, is_local(host)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Let a request in, or refuse it."""
        why = self._refusal(Request(scope)) if scope["type"] == "http" else ""
        await (refused(403, why) if why else self._app)(scope, receive, send)

    def _refusal(self, request: Request) -> str:
        """Return why a request may not come in; empty where it may."""
        host = request.headers.get("host", "")
        if self._is_local and not names_this_machine(host):
            # A page's own name that was made to lead here.
            return "this address is for its own machine alone"
        if is_of_other_place(request.headers.get("origin"), host):
            return "pages of other places may not come here"
        return ""


def refused(status: int, message: str) -> JSONResponse:
    """Return an answer that is an error, as OpenAI's interface tells them."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": None}}, status)


def refusal_of_hosts(request: Request, shared: SharedKey) -> JSONResponse | None:
    """Return why a request is none of another host; None where it may be one.

    What changes something has to be JSON and to say so: a page that is none of this machine's could
    send text without being asked for more.
    """
    if not shared.lets_in(request):
        return refused(401, "give the key of the hosts as Authorization: Bearer KEY")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":
        return refused(415, "send JSON, as Content-Type: application/json")
    return None


async def body_of(request: Request, most_bytes: int = _MOST_BODY_BYTES) -> bytes | None:
    """Return the body of a request; None where it is too large."""
    receive = bounded(request.receive, most_bytes, _TooLargeError)
    try:
        return await Request(request.scope, receive).body()
    except _TooLargeError:
        return None


class _TooLargeError(Exception):
    """A body is larger than it may be."""
