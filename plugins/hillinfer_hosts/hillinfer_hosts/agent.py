# SPDX-License-Identifier: Apache-2.0
"""What a host does beside its replica: serves extents of its store, and brings some from others."""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hillinfer.errors import HillInferError
from hillinfer.store.keys import KEY_BYTES
from hillinfer.store.store import Store
from hillinfer_hosts.extents import RangeError, ServedExtents, key_of, range_of
from hillinfer_hosts.transfer import POOL_HEADER, Brought, HostReader, Wanted, bring

FETCH = "/fetch"
# Prefixes that are brought at once: more would only share one network.
_AT_ONCE = 2
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


def refused(status: int, message: str) -> JSONResponse:
    """Return an answer that is an error, as OpenAI's interface tells them."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": None}}, status)


async def body_of(request: Request, most_bytes: int = _MOST_BODY_BYTES) -> bytes | None:
    """Return the body of a request; None where it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            return None
        parts.append(part)
    return b"".join(parts)


class Agent:
    """Answers other hosts, and the router.

    Parameters
    ----------
    store
        This host's, open.
    key
        What hosts share, empty for none.
    seconds
        After which bringing a prefix ends.
    """

    def __init__(self, store: Store, key: str = "", seconds: float = 30.0) -> None:
        self._store, self._extents = store, ServedExtents(store)
        self._key, self._shared = key, SharedKey(key)
        self._seconds = seconds
        self._room = threading.BoundedSemaphore(_AT_ONCE)

    def application(self) -> Starlette:
        """Return it as an application of ASGI."""
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/namespaces/{name}", self._let_in(self._namespace), methods=["GET"]),
                Route("/extents/{name}", self._let_in(self._extent), methods=["GET"]),
                Route(FETCH, self._let_in(self._fetch), methods=["POST"]),
            ]
        )

    # --- inside ----------------------------------------------------------------------------

    def _let_in(self, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def checked(request: Request) -> Response:
            if not self._shared.lets_in(request):
                return refused(401, "give the key of the hosts as Authorization: Bearer KEY")
            answered: Response = await answer(request)
            return answered

        return checked

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _namespace(self, request: Request) -> Response:
        digest = key_of(request.path_params["name"])
        if digest is None:
            return refused(404, "a namespace is named by 64 hexadecimal digits")
        found = await run_in_threadpool(self._extents.namespace, digest)
        if found is None:
            return refused(404, "this store has no such namespace")
        told = {
            "about": found.about,
            "layers": found.layers,
            "row_bytes": found.row_bytes,
            "shadow_bytes": found.shadow_bytes,
        }
        return JSONResponse(told)

    async def _extent(self, request: Request) -> Response:
        key = key_of(request.path_params["name"])
        if key is None:
            return refused(404, "an extent is named by 64 hexadecimal digits")
        found = await run_in_threadpool(self._extents.extent, key)
        if found is None:
            return refused(404, "no such prefix is stored")
        size = found.span.byte_count
        try:
            wanted = range_of(request.headers.get("range"), size)
        except RangeError as error:
            return refused(416, str(error))
        try:
            data = await run_in_threadpool(self._extents.read, found, wanted)
        except OSError:
            # What may name places of the machine is not told.
            return refused(503, "the drive fails")
        headers = {
            "Content-Range": f"bytes {wanted.start}-{wanted.stop - 1}/{size}",
            POOL_HEADER: found.pool.hex(),
        }
        return Response(data, 206, headers, "application/octet-stream")

    async def _fetch(self, request: Request) -> Response:
        body = await body_of(request)
        if body is None:
            return refused(413, "the request is too large")
        try:
            source, wanted, seconds = _asked(body)
        except (KeyError, TypeError, ValueError):
            return refused(400, "that names no prefix of another host")
        if not self._room.acquire(blocking=False):
            return refused(429, "other prefixes are being brought")
        bringing = partial(self._bring, source, wanted, min(seconds, self._seconds))
        brought = await run_in_threadpool(bringing)
        return JSONResponse(
            {
                "tokens": brought.tokens,
                "new_tokens": brought.new_tokens,
                "bytes": brought.byte_count,
                "seconds": brought.seconds,
                "failure": brought.failure,
            }
        )

    def _bring(self, source: str, wanted: Wanted, seconds: float) -> Brought:
        began = time.monotonic()
        reader = HostReader(source, self._key, began + seconds)
        try:
            return bring(self._store, reader, wanted)
        except HillInferError as error:
            return Brought(0, 0, reader.byte_count, time.monotonic() - began, str(error))
        finally:
            reader.close()
            self._room.release()


def fetch_body(source: str, wanted: Wanted, seconds: float) -> dict[str, Any]:
    """Return what a router sends to `FETCH`.

    Parameters
    ----------
    source
        URL of the agent that has the rows.
    wanted
        Which prefix.
    seconds
        After which it is given up.
    """
    return {
        "source": source,
        "namespace": wanted.namespace.hex(),
        "salt": wanted.salt.hex(),
        "ids": list(wanted.ids),
        "seconds": seconds,
    }


def _asked(body: bytes) -> tuple[str, Wanted, float]:
    told = json.loads(body)
    digest, salt = bytes.fromhex(told["namespace"]), bytes.fromhex(told["salt"])
    ids, source = told["ids"], told["source"]
    if len(digest) != KEY_BYTES or not isinstance(source, str):
        raise ValueError("namespace")
    if not source.startswith(("http://", "https://")):
        raise ValueError("source")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 1 << 32 for one in ids):
        raise ValueError("ids")
    return source, Wanted(digest, tuple(ids), salt), float(told["seconds"])
