# SPDX-License-Identifier: Apache-2.0
"""What a host does beside its replica: serves extents of its store, and brings some from others."""

from __future__ import annotations

import base64
import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.errors import HillInferError
from hillinfer.store.keys import KEY_BYTES
from hillinfer.store.store import Store
from hillinfer_hosts.directory import HostsError, checked_url
from hillinfer_hosts.extents import (
    MOST_RANGE_BYTES,
    RangeError,
    ServedExtent,
    ServedExtents,
    key_of,
    pages_of,
    range_of,
)
from hillinfer_hosts.gate import Door, SharedKey, body_of, refusal_of_hosts, refused
from hillinfer_hosts.transfer import (
    INTO_HEADER,
    POOL_HEADER,
    TRANSPORTS,
    WRITTEN_HEADER,
    Brought,
    HostReader,
    Wanted,
    bring,
)
from hillinfer_hosts.transports import DirectMemory, Transport, TransportError

FETCH = "/fetch"
# Prefixes that are brought at once: more would only share one network.
_AT_ONCE = 2
# Pieces of registered memory: as many as are brought, and as many that are sent to others.
_PIECES, _PIECE_BYTES = 2 * _AT_ONCE, MOST_RANGE_BYTES + 2 * PAGE_BYTES
# What writing a range to another host may take before HTTP sends it.
_WRITE_SECONDS = 1.0
_MOST_INTRODUCTION = 1 << 20


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
    host
        The address that is listened at.
    transport
        What puts rows into memory of hosts that have it too; HTTP brings all where None.

    Raises
    ------
    TransportError
        Where its memory cannot be registered.
    """

    def __init__(
        self,
        store: Store,
        key: str = "",
        seconds: float = 30.0,
        host: str = "127.0.0.1",
        transport: Transport | None = None,
    ) -> None:
        self._store, self._extents = store, ServedExtents(store)
        self._key, self._shared = key, SharedKey(key)
        self._seconds, self._host = seconds, host
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        self._direct: DirectMemory | None = None
        if transport is not None:
            self._direct = DirectMemory(transport, _PIECES, _PIECE_BYTES)

    def application(self) -> Starlette:
        """Return it as an application of ASGI."""
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/namespaces/{name}", self._let_in(self._namespace), methods=["GET"]),
                Route("/extents/{name}", self._let_in(self._extent), methods=["GET"]),
                Route(TRANSPORTS + "{name}", self._let_in(self._meet), methods=["POST"]),
                Route(FETCH, self._let_in(self._fetch), methods=["POST"]),
            ],
            middleware=[Middleware(Door, host=self._host)],
        )

    # --- inside ----------------------------------------------------------------------------

    def _let_in(self, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def checked(request: Request) -> Response:
            why = refusal_of_hosts(request, self._shared)
            if why is not None:
                return why
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
        headers = {
            "Content-Range": f"bytes {wanted.start}-{wanted.stop - 1}/{size}",
            POOL_HEADER: found.pool.hex(),
        }
        try:
            into = request.headers.get(INTO_HEADER)
            if into and await run_in_threadpool(self._written, found, wanted, into):
                return Response(b"", 206, headers | {WRITTEN_HEADER: str(len(wanted))})
            data = await run_in_threadpool(self._extents.read, found, wanted)
        except OSError:
            # What may name places of the machine is not told.
            return refused(503, "the drive fails")
        return Response(data, 206, headers, "application/octet-stream")

    def _written(self, extent: ServedExtent, wanted: range, into: str) -> bool:
        """Put a range into another host's memory; False where HTTP has to bring it."""
        peer, _, place = into.partition(" ")
        if self._direct is None or not place.isdecimal():
            return False
        with self._direct.taken(pages_of(wanted)) as piece:
            if piece is None:
                return False
            data = self._extents.read_into(extent, wanted, piece)
            with suppress(TransportError):
                self._direct.write(peer, data, int(place), _WRITE_SECONDS)
                return True
        return False

    async def _meet(self, request: Request) -> Response:
        if self._direct is None or request.path_params["name"] != self._direct.name:
            return refused(404, "this host has no such transport")
        body = await body_of(request, _MOST_INTRODUCTION)
        if body is None:
            return refused(413, "the request is too large")
        try:
            told = base64.b64decode(json.loads(body)["introduction"], validate=True)
            peer = await run_in_threadpool(self._direct.meet, told)
        except (TransportError, KeyError, TypeError, ValueError, RecursionError):
            return refused(400, "that introduces no host")
        return JSONResponse({"peer": peer})

    async def _fetch(self, request: Request) -> Response:
        body = await body_of(request)
        if body is None:
            return refused(413, "the request is too large")
        try:
            source, wanted, seconds = await run_in_threadpool(_asked, body)
        except (HostsError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return refused(400, "that names no prefix of another host")
        bringing = partial(self._bring, source, wanted, min(seconds, self._seconds))
        brought = await run_in_threadpool(bringing)
        if brought is None:
            return refused(429, "other prefixes are being brought")
        return JSONResponse(
            {
                "tokens": brought.tokens,
                "new_tokens": brought.new_tokens,
                "bytes": brought.byte_count,
                "direct_bytes": brought.direct_bytes,
                "seconds": brought.seconds,
                "failure": brought.failure,
            }
        )

    def _bring(self, source: str, wanted: Wanted, seconds: float) -> Brought | None:
        """Return what came; None where too much is being brought already."""
        if not self._room.acquire(blocking=False):
            return None
        began = time.monotonic()
        try:
            with closing(HostReader(source, self._key, began + seconds, self._direct)) as reader:
                try:
                    return bring(self._store, reader, wanted)
                except HillInferError as error:
                    failure, count = str(error), reader.byte_count
        finally:
            self._room.release()
        return Brought(0, 0, count, time.monotonic() - began, failure)


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
    checked_url(source, "source")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 1 << 32 for one in ids):
        raise ValueError("ids")
    seconds = float(told["seconds"])
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("seconds")
    return source, Wanted(digest, tuple(ids), salt), seconds
