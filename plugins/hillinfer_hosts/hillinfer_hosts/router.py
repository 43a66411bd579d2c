# SPDX-License-Identifier: Apache-2.0
"""The router: an application of ASGI before replicas, each request to who has read its prompt.

Requests and answers pass as they are. A host that does not answer, or dies before its answer is
whole, costs the time of another one's answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hillinfer.errors import HillInferError
from hillinfer_hosts.agent import FETCH, SharedKey, body_of, fetch_body, refused
from hillinfer_hosts.announcing import ANNOUNCE, unpacked
from hillinfer_hosts.counts import RouterCounts
from hillinfer_hosts.directory import Directory, Host
from hillinfer_hosts.fleet import Fleet
from hillinfer_hosts.prompts import CHATS, TEXTS, Asked, Chains, SaltRule
from hillinfer_hosts.streams import OtherAnswerError, StreamedAnswer, error_event
from hillinfer_hosts.transfer import Wanted
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Of one hop alone (RFC 9110, 7.6.1), and what is made anew.
_OF_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "host", "content-length"),
    )
)
# Replicas that start, end or have no room: another one may answer.
_ELSEWHERE = frozenset((429, 502, 503))
_MOST_BODY_BYTES = 64 << 20
# Keys of 20 TB of the smallest model.
_MOST_ANNOUNCED_BYTES = 256 << 20
CHOSEN_HEADER = "X-HillInfer-Host"


@dataclass(frozen=True)
class RouterRules:
    """What a router does.

    Parameters
    ----------
    key
        What hosts share; empty for none.
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
    """

    hosts: list[Host]
    asked: Asked | None = None
    chains: Chains | None = None
    held: dict[str, int] = field(default_factory=dict)

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
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
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
            ]
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
        if not self._shared.lets_in(request):
            return refused(401, "give the key of the hosts as Authorization: Bearer KEY")
        hosts = await run_in_threadpool(self._fleet.hosts)
        return JSONResponse({"hosts": [one.told() for one in hosts]})

    async def _announce(self, request: Request) -> Response:
        if not self._shared.lets_in(request):
            return refused(401, "give the key of the hosts as Authorization: Bearer KEY")
        body = await body_of(request, _MOST_ANNOUNCED_BYTES)
        if body is None:
            return refused(413, "the announcement is too large")
        try:
            host, change = await run_in_threadpool(lambda: unpacked(json.loads(body)))
            is_known = await run_in_threadpool(self._directory.announce, host, change)
        except (HillInferError, ValueError) as error:
            return refused(400, str(error))
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
        way = _Way(list(await run_in_threadpool(self._fleet.hosts)))
        if request.method == "POST" and request.url.path in (CHATS, TEXTS):
            given = request.headers.get("authorization", "")
            way.asked = Asked.read(body, given, self._rules.salts, self._rules.salt)
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
                headers=_passed(request.headers.items()),
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
                    return StreamingResponse(relayed, 200, _headers(answer, host))
                else:
                    whole = await _whole(answer, host)
                    self._count(way, host, tries)
                    return whole
                way.hosts.remove(host)
            except httpx.TransportError:
                await self._lost(way, host)
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
        own = stored.get(host.name, (0, b""))[0]
        others = [
            (*stored[one.name], one.agent)
            for one in way.hosts
            if one.name in stored and one.name != host.name and one.agent
        ]
        groups, digest, source = max(others, default=(0, b"", ""))
        if (groups - own) * GROUP_TOKENS < self._rules.transfer_tokens:
            return
        seconds = self._rules.transfer_seconds
        wanted = Wanted(digest, way.chains.ids[: groups * GROUP_TOKENS], way.chains.salt)
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
            # It is computed then.
            return

    async def _sent(self, request: Request, body: bytes, host: Host) -> httpx.Response:
        query = f"?{request.url.query}" if request.url.query else ""
        sent = self._client.build_request(
            request.method,
            f"{host.replica}{request.url.path}{query}",
            headers=_passed(request.headers.items()),
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
                except httpx.TransportError:
                    pass
                except OtherAnswerError as error:
                    yield error_event(f"the host was lost, and {error}: ask again")
                    return
                finally:
                    await answer.aclose()
                if relayed.is_done:
                    return
                await self._lost(way, host)
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
            except httpx.TransportError:
                await self._lost(way, host)
                continue
            if answer.status_code == httpx.codes.OK:
                opened.enter_context(self._fleet.busy(host))
                self._count(way, host, 2)
                return host, answer
            await answer.aclose()
            way.hosts.remove(host)
        return "the host was lost, and no other one answers: ask again"

    # --- inside ----------------------------------------------------------------------------

    async def _lost(self, way: _Way, host: Host) -> None:
        self.counts.lost.labels(host.name).inc()
        await run_in_threadpool(self._fleet.lost, host)
        way.held.pop(host.name, None)
        if host in way.hosts:
            way.hosts.remove(host)

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
    await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        leaving.cancel()
        return work.result()
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
    # Nobody reads it.
    return refused(499, "the client left")


def _passed(headers: Any) -> dict[str, str]:
    """Return the headers that go on to the next hop."""
    return {name: value for name, value in headers if name.lower() not in _OF_HOP}


def _headers(answer: httpx.Response, host: Host) -> dict[str, str]:
    # Decoded on the way.
    own = {
        name: value
        for name, value in _passed(answer.headers.items()).items()
        if name.lower() != "content-encoding"
    }
    return own | {CHOSEN_HEADER: host.name}


async def _whole(answer: httpx.Response, host: Host) -> Response:
    try:
        content = await answer.aread()
    finally:
        await answer.aclose()
    return Response(content, answer.status_code, _headers(answer, host))
