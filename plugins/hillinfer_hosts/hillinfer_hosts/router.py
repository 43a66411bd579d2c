# SPDX-License-Identifier: Apache-2.0
"""The router: an application of ASGI before replicas, each request to who has read its prompt.

Requests and answers pass as they are. A host that does not answer, or dies before its answer is
whole, costs the time of another one's answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hillinfer.errors import HillInferError
from hillinfer_hosts.agent import FETCH, fetch_body
from hillinfer_hosts.announcing import ANNOUNCE, unpacked
from hillinfer_hosts.counts import RouterCounts
from hillinfer_hosts.directory import Directory, Host
from hillinfer_hosts.fleet import Fleet
from hillinfer_hosts.gate import Door, SharedKey, body_of, refusal_of_hosts, refused
from hillinfer_hosts.passing import passed, with_headers
from hillinfer_hosts.prompts import CHATS, TEXTS, Asked, Chains, SaltRule
from hillinfer_hosts.streams import OtherAnswerError, StreamedAnswer, error_event
from hillinfer_hosts.transfer import Wanted
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Replicas that start, end or have no room: another one may answer.
_ELSEWHERE = frozenset((429, 502, 503))
_MOST_BODY_BYTES = 64 << 20
# Announcements of more come in parts.
_MOST_ANNOUNCED_BYTES = 64 << 20
# Hosts that one request may take down, should it be the request that does it.
_MOST_TRIES = 2
# Shorter than replicas keep a connection that nothing comes over (uvicorn: 5): else what they have
# closed would look like a host that died.
_KEPT_SECONDS = 2.0
# Nothing else says that a host is gone: what takes long is not dead, and what cannot be sent is
# the client's.
_LOSSES = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)


@dataclass(frozen=True)
class RouterRules:
    """What a router does.

    Parameters
    ----------
    key
        What hosts share; empty for none.
    host
        The address that is listened at.
    salts, salt
        What keeps tenants apart at the replicas.
    tokenize_seconds
        That a replica has to make the tokens of a prompt; without them it goes to the idlest.
    connect_seconds, answer_seconds
        That a replica has to take a connection, and to send something more of an answer.
    transfer_tokens
        Tokens that another host must hold more for them to be brought to the chosen one; 0: never.
    transfer_seconds
        That this may take before the request goes on without.
    """

    key: str = ""
    host: str = "127.0.0.1"
    salts: SaltRule = SaltRule.BODY
    salt: bytes = b""
    tokenize_seconds: float = 2.0
    connect_seconds: float = 2.0
    answer_seconds: float = 600.0
    transfer_tokens: int = 0
    transfer_seconds: float = 10.0


@dataclass
class _Way:
    """Where a request goes.

    Parameters
    ----------
    hosts
        Those that were not tried yet.
    chains
        Of its prompt; None where that is not known.
    held
        Groups of it by host.
    asked
        The request; None where it is for no answer.
    sources
        Hosts whose rows may be brought, those without room too.
    tries
        Hosts that it was sent to, and that did not answer.
    """

    hosts: list[Host]
    asked: Asked | None = None
    chains: Chains | None = None
    held: dict[str, int] = field(default_factory=dict)
    sources: list[Host] = field(default_factory=list)
    tries: int = 0

    @property
    def groups(self) -> int:
        """How many groups of tokens its prompt has, as far as that is known."""
        return 0 if self.chains is None else len(self.chains.own)


class Router:
    """Sends requests to replicas.

    Parameters
    ----------
    directory
        Says who holds what; hosts announce themselves to it through this router too.
    fleet
        The hosts.
    rules
        What it does.
    """

    def __init__(self, directory: Directory, fleet: Fleet, rules: RouterRules) -> None:
        self._directory, self._fleet, self._rules = directory, fleet, rules
        self._shared = SharedKey(rules.key)
        self.counts = RouterCounts()
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEPT_SECONDS
        )
        timeout = httpx.Timeout(rules.answer_seconds, connect=rules.connect_seconds)
        # Nobody's proxy comes between hosts.
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)

    def application(self) -> Starlette:
        """Return it as an application of ASGI."""
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/hosts", self._hosts, methods=["GET"]),
                Route(ANNOUNCE, self._announce, methods=["POST"]),
                Route("/v1/files{rest:path}", self._files, methods=methods),
                Route("/{path:path}", self._any, methods=methods),
            ],
            middleware=[Middleware(Door, host=self._rules.host)],
        )

    # --- about the hosts ---------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        hosts = await run_in_threadpool(self._fleet.hosts)
        self.counts.hosts.set(len(hosts))
        state = "ok" if hosts else "no host is there"
        return JSONResponse({"status": state, "hosts": len(hosts)}, 200 if hosts else 503)

    async def _metrics(self, request: Request) -> Response:
        self.counts.hosts.set(len(await run_in_threadpool(self._fleet.hosts)))
        return Response(self.counts.text(), media_type="text/plain; version=0.0.4")

    async def _hosts(self, request: Request) -> Response:
        why = refusal_of_hosts(request, self._shared)
        if why is not None:
            return why
        hosts = await run_in_threadpool(self._fleet.hosts)
        return JSONResponse({"hosts": [one.told() for one in hosts]})

    async def _announce(self, request: Request) -> Response:
        why = refusal_of_hosts(request, self._shared)
        if why is not None:
            return why
        body = await body_of(request, _MOST_ANNOUNCED_BYTES)
        if body is None:
            return refused(413, "the announcement is too large")
        try:
            host, change = await run_in_threadpool(lambda: unpacked(json.loads(body)))
        except (HillInferError, ValueError, RecursionError) as error:
            return refused(400, str(error))
        try:
            is_known = await run_in_threadpool(self._directory.announce, host, change)
        except HillInferError as error:
            return refused(503, str(error))
        return JSONResponse({"is_known": is_known}, 200 if is_known else 409)

    async def _files(self, request: Request) -> Response:
        return refused(
            501, "files lie at one host, and this router does not know which: ask that host itself"
        )

    # --- requests ------------------------------------------------------------------------------

    async def _any(self, request: Request) -> Response:
        body = await body_of(request, _MOST_BODY_BYTES)
        if body is None:
            return refused(413, f"the request has more than {_MOST_BODY_BYTES} bytes")
        there = await run_in_threadpool(self._fleet.hosts)
        way = _Way(list(there), sources=list(there))
        if request.method == "POST" and request.url.path in (CHATS, TEXTS):
            given = request.headers.get("authorization", "")
            rules = self._rules
            way.asked = await run_in_threadpool(Asked.read, body, given, rules.salts, rules.salt)
        if way.asked is not None and self._fleet.policy.uses_prefixes:
            with self.counts.looking_seconds.time():
                await self._look_up(way, way.asked, request)
        return await _beside_client(self._answered(request, body, way), request)

    async def _look_up(self, way: _Way, asked: Asked, request: Request) -> None:
        """Learn who holds how much of a prompt; nothing where its tokens cannot be had."""
        ids = asked.ids
        if ids is None:
            ids = await self._tokens(way, asked, request)
        if ids is None:
            return
        namespaces = self._fleet.namespaces(way.hosts)
        way.chains = await run_in_threadpool(Chains.of, ids, asked.salt, namespaces)
        if way.chains is not None:
            way.held = await run_in_threadpool(self._fleet.held, way.chains)

    async def _tokens(self, way: _Way, asked: Asked, request: Request) -> tuple[int, ...] | None:
        wanted, host = asked.to_tokenize(), self._fleet.helper(way.hosts)
        if wanted is None or host is None:
            return None
        try:
            answer = await self._client.post(
                f"{host.replica}/tokenize",
                json=wanted,
                headers=passed(request.headers.raw),
                timeout=self._rules.tokenize_seconds,
            )
            tokens: Any = answer.json()["tokens"] if answer.status_code == httpx.codes.OK else ()
        except httpx.ConnectError:
            await self._lost(way, host)
            return None
        except (httpx.HTTPError, KeyError, TypeError, ValueError):
            return None
        if not isinstance(tokens, list) or not all(type(one) is int for one in tokens):
            return None
        return tuple(tokens)

    async def _answered(self, request: Request, body: bytes, way: _Way) -> Response:
        """Return the first answer of a host that gives one."""
        last: Response | None = None
        is_streamed = way.asked is not None and way.asked.is_streamed
        tries = 0
        while (host := self._fleet.choose(way.hosts, way.held, way.groups)) is not None:
            await self._prepare(way, host)
            tries += 1
            opened = ExitStack()
            opened.enter_context(self._fleet.busy(host))
            try:
                answer = await self._sent(request, body, host)
                if answer.status_code in _ELSEWHERE:
                    last = await _whole(answer, host)
                elif is_streamed and answer.status_code == httpx.codes.OK:
                    self._count(way, host, tries)
                    relayed = self._relayed(request, body, way, host, answer, opened.pop_all())
                    return with_headers(StreamingResponse(relayed), answer, host.name)
                else:
                    whole = await _whole(answer, host)
                    self._count(way, host, tries)
                    return whole
                way.hosts.remove(host)
            except httpx.RequestError as error:
                ended = await self._failed(way, host, error)
                if ended is not None:
                    return refused(*ended)
            finally:
                opened.close()
        return last or refused(503, "no replica answers: wait, or look at the hosts")

    async def _prepare(self, way: _Way, host: Host) -> None:
        """Note where a prompt goes, and have its rows brought there where that was asked for."""
        if way.chains is None:
            return
        await run_in_threadpool(self._fleet.expect, way.chains, host)
        if not self._rules.transfer_tokens or not host.agent:
            return
        stored = await run_in_threadpool(self._fleet.stored, way.chains)
        own = stored.get(host.name, {})
        found: dict[bytes, int] = {}
        source = ""
        for one in way.sources:
            if one.name == host.name or not one.agent:
                continue
            # Of other engines' rows the chosen host would find nothing; of one engine's ranks it
            # needs those of each.
            more = {
                digest: groups
                for digest, groups in stored.get(one.name, {}).items()
                if digest in host.namespaces
                and (groups - own.get(digest, 0)) * GROUP_TOKENS >= self._rules.transfer_tokens
            }
            if max(more.values(), default=0) > max(found.values(), default=0):
                found, source = more, one.agent
        until = time.monotonic() + self._rules.transfer_seconds
        for digest, groups in found.items():
            wanted = Wanted(digest, way.chains.ids[: groups * GROUP_TOKENS], way.chains.salt)
            if not await self._brought(host, source, wanted, until - time.monotonic()):
                return

    async def _brought(self, host: Host, source: str, wanted: Wanted, seconds: float) -> bool:
        """Have rows brought to a host; False where they did not come, and are computed."""
        if seconds <= 0:
            return False
        headers = {"Authorization": f"Bearer {self._rules.key}"} if self._rules.key else {}
        try:
            answer = await self._client.post(
                host.agent + FETCH,
                json=fetch_body(source, wanted, seconds),
                headers=headers,
                timeout=seconds + 1,
            )
            told: dict[str, Any] = answer.json()
            self.counts.brought_tokens.inc(told["new_tokens"])
            self.counts.brought_bytes.inc(told["bytes"])
        except (httpx.HTTPError, KeyError, TypeError, ValueError):
            return False
        return True

    async def _sent(self, request: Request, body: bytes, host: Host) -> httpx.Response:
        query = f"?{request.url.query}" if request.url.query else ""
        # As it was given: what is decoded may have other ends.
        path = request.scope["raw_path"].decode("latin-1")
        sent = self._client.build_request(
            request.method,
            f"{host.replica}{path}{query}",
            headers=passed(request.headers.raw),
            content=body,
        )
        return await self._client.send(sent, stream=True)

    async def _relayed(
        self,
        request: Request,
        body: bytes,
        way: _Way,
        host: Host,
        answer: httpx.Response,
        opened: ExitStack,
    ) -> AsyncIterator[bytes]:
        """Yield the events of an answer, of other hosts where one dies."""
        relayed = StreamedAnswer()
        with opened:
            while True:
                try:
                    async for data in answer.aiter_bytes():
                        for event in relayed.taken(data):
                            yield event
                    if relayed.is_done:
                        return
                    ended = await self._failed(way, host, httpx.ReadError("it ended"))
                except httpx.RequestError as error:
                    ended = await self._failed(way, host, error)
                except OtherAnswerError as error:
                    yield error_event(f"the host was lost, and {error}: ask again")
                    return
                finally:
                    await answer.aclose()
                if relayed.is_done:
                    return
                if ended is not None:
                    yield error_event(ended[1])
                    return
                following = await self._begun_again(request, body, way, opened, relayed)
                if isinstance(following, str):
                    yield error_event(following)
                    return
                host, answer = following

    async def _begun_again(
        self, request: Request, body: bytes, way: _Way, opened: ExitStack, relayed: StreamedAnswer
    ) -> tuple[Host, httpx.Response] | str:
        """Return another host's answer from its beginning, or what the client is told."""
        try:
            relayed.begin_again()
        except OtherAnswerError as error:
            return f"the host was lost, and {error}: ask again"
        while (host := self._fleet.choose(way.hosts, way.held, way.groups)) is not None:
            await self._prepare(way, host)
            try:
                answer = await self._sent(request, body, host)
            except httpx.RequestError as error:
                ended = await self._failed(way, host, error)
                if ended is not None:
                    return ended[1]
                continue
            if answer.status_code == httpx.codes.OK:
                opened.enter_context(self._fleet.busy(host))
                self._count(way, host, 2)
                return host, answer
            await answer.aclose()
            way.hosts.remove(host)
        return "the host was lost, and no other one answers: ask again"

    # --- inside ----------------------------------------------------------------------------

    async def _failed(
        self, way: _Way, host: Host, error: httpx.RequestError
    ) -> tuple[int, str] | None:
        """Note that a host gave no answer; return what the client is told, None for another try."""
        if isinstance(error, _LOSSES):
            await self._lost(way, host)
        elif isinstance(error, httpx.ConnectTimeout | httpx.WriteError):
            self._fleet.rest(host)
            way.hosts.remove(host)
        elif isinstance(error, httpx.TimeoutException):
            return 504, "the replica took too long: ask again, or for less"
        else:
            return 502, f"the request or its answer cannot be passed on: {type(error).__name__}"
        if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            way.tries += 1
        if way.tries >= _MOST_TRIES:
            return 502, f"the host was lost, {way.tries} of them over this request: ask again"
        return None

    async def _lost(self, way: _Way, host: Host) -> None:
        self.counts.lost.labels(host.name).inc()
        await run_in_threadpool(self._fleet.lost, host)
        way.held.pop(host.name, None)
        for hosts in (way.hosts, way.sources):
            if host in hosts:
                hosts.remove(host)

    def _count(self, way: _Way, host: Host, tries: int) -> None:
        groups = way.held.get(host.name, 0)
        self.counts.requests.labels(host.name, "prefix" if groups else "load").inc()
        if tries > 1:
            self.counts.again.inc()
        if way.chains is not None:
            self.counts.prompt_tokens.inc(len(way.chains.ids))
            self.counts.held_tokens.inc(groups * GROUP_TOKENS)


async def _beside_client(answering: Coroutine[Any, Any, Response], request: Request) -> Response:
    """Return an answer; let go of it where the client leaves, so that its replica does too."""
    work = asyncio.ensure_future(answering)
    # The body was read: what comes now is the client's end.
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
    finally:
        # Also where this router ends.
        for task in (work, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
    # Nobody reads it.
    return refused(499, "the client left")


async def _whole(answer: httpx.Response, host: Host) -> Response:
    try:
        content = await answer.aread()
    finally:
        await answer.aclose()
    return with_headers(Response(content, answer.status_code), answer, host.name)
