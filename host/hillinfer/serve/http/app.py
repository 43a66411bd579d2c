# SPDX-License-Identifier: Apache-2.0
"""The routes of a server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hillinfer.errors import HillInferError
from hillinfer.serve.documents import Documents, with_documents
from hillinfer.serve.fields import Fields, parsed
from hillinfer.serve.http.files import FileRoutes
from hillinfer.serve.http.gate import BODY_SECONDS, FewAtOnce, Gate, Visit, late, visit_of
from hillinfer.serve.http.schema import body_of
from hillinfer.serve.http.streams import (
    AnswerStream,
    GoneError,
    Mailbox,
    beside_client,
    whole_answer,
)
from hillinfer.serve.http.telemetry import CONTENT_TYPE, Figures, Log
from hillinfer.serve.http.wire import CallWire, ChatWire, Head, TextWire, Wire, event
from hillinfer.serve.inference import Inference, State
from hillinfer.serve.jobs import Given, Job
from hillinfer.serve.refusals import ApiError, api_error, gone_error, invalid
from hillinfer.serve.requests import (
    AnswerWishes,
    ChatRequest,
    TextRequest,
    chat_request,
    read_messages,
    text_request,
)
from hillinfer.serve.rules import ServerRules
from hillinfer.serve.served_model import ServedModel

_LARGE_BYTES = 64 << 10
# A schema may take a second of a processor, which answers under way need.
_GRAMMARS_AT_ONCE = 2
# Tokens that decide what text comes behind them: of some tokenizers whether a space is there.
_SEEN_BEFORE = 8
_PAGE = Path(__file__).with_name("page.html")
_Asked = TypeVar("_Asked")


def own_version() -> str:
    """Return the version of this package."""
    try:
        return version("hillinfer")
    except PackageNotFoundError:
        return "0+unknown"


class Routes:
    """Answers requests, with one inference thread behind all of them.

    Parameters
    ----------
    inference
        That thread.
    rules
        Of the server.
    documents
        Files of clients.
    figures
        What `/metrics` tells.
    log
        Gets what failed.
    """

    def __init__(
        self,
        inference: Inference,
        documents: Documents,
        rules: ServerRules,
        figures: Figures,
        log: Log,
    ) -> None:
        self._inference, self._rules = inference, rules
        self._documents = documents
        self._figures, self._log = figures, log
        self._began = int(time.time())
        self._grammars_begun = FewAtOnce(_GRAMMARS_AT_ONCE, rules.queue)

    # --- about the server ------------------------------------------------------------------

    async def health(self) -> Response:
        """Say whether requests are answered now."""
        state = self._inference.state
        told = {"status": state.value}
        return JSONResponse(told, 200 if state is State.READY else 503)

    async def version(self) -> Response:
        """Say which version this is."""
        return JSONResponse({"version": own_version()})

    def metrics(self) -> Response:
        """Tell what was counted; in a thread, because the store is asked."""
        return Response(self._figures.text(), media_type=CONTENT_TYPE)

    async def models(self) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._model(self._inference.served)]})

    async def model(self, name: str) -> Response:
        """Tell of one model."""
        return JSONResponse(self._model(self._named(name)))

    async def load(self, request: Request) -> Response:
        """Say that the model is there, as transformers' chat client asks before it talks."""
        served = self._named((await _read(request, Fields)).text("model"))
        told = {"status": "ready", "model": served.name, "cached": True}
        return Response(event(told), media_type="text/event-stream")

    def _model(self, served: ServedModel) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "created": self._began,
            "owned_by": "hillinfer",
            "max_model_len": served.context_tokens,
        }

    # --- tokens ----------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of a chat up to where the answer begins."""
        fields = await _read(request, Fields)
        served = self._named(fields.text("model"))
        tenant = visit_of(request.scope).tenant
        return await run_in_threadpool(self._tokens, served, fields, tenant)

    def _tokens(self, served: ServedModel, fields: Fields, tenant: bytes) -> Response:
        if fields.take("messages") is not None:
            ids = self._of_chat(served, read_messages(fields), tenant)
        else:
            text = fields.text("prompt")
            if text is None:
                raise invalid("prompt is missing", "prompt", "missing_field")
            bare = fields.take("add_special_tokens") is False
            ids = served.prompts.of_text(text, special=not bare)
        told = {"tokens": ids, "count": len(ids), "max_model_len": served.context_tokens}
        return JSONResponse(told)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        fields = await _read(request, Fields)
        return await run_in_threadpool(_text, self._named(fields.text("model")), fields)

    async def tokenizer_info(self) -> Response:
        """Tell what a harness asks of a tokenizer that it does not have."""
        served = self._inference.served
        tokenizer = served.tokenizer
        return JSONResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "eos_token": tokenizer.eos_token,
                "bos_token": tokenizer.bos_token,
                "pad_token": tokenizer.pad_token,
                "chat_template": getattr(tokenizer, "chat_template", None),
                "max_model_len": served.context_tokens,
            }
        )

    # --- answers ---------------------------------------------------------------------------

    async def chat(self, request: Request) -> Any:
        """`POST /v1/chat/completions`."""
        asked = await _read(request, chat_request)
        served = self._named(asked.model)
        self._inference.check_room()
        ids = await run_in_threadpool(
            self._of_chat, served, asked.messages, visit_of(request.scope).tenant
        )
        may_call = asked.wishes.format is not None and asked.wishes.format.may_call
        wire = (CallWire if may_call else ChatWire)(
            Head(asked.model),
            served,
            logprobs=asked.wishes.top is not None,
            told_usage=asked.delivery.told_usage,
        )
        return await self._answered("chat", request, served, ids, asked, wire)

    def _of_chat(
        self, served: ServedModel, messages: Sequence[Mapping[str, Any]], tenant: bytes
    ) -> list[int]:
        """Return the tokens of a chat, with the files that it names."""
        text_of = partial(self._documents.text, tenant=tenant)
        check = served.prompts.check_letters
        return served.prompts.of_chat(with_documents(messages, text_of, check))

    async def text(self, request: Request) -> Any:
        """`POST /v1/completions`."""
        asked = await _read(request, text_request)
        served = self._named(asked.model)
        self._inference.check_room()
        ids, echo = await run_in_threadpool(_prompt, served, asked)
        wire = TextWire(
            Head(asked.model),
            served,
            logprobs=asked.wishes.top is not None,
            told_usage=asked.delivery.told_usage,
            echo=echo,
            first_id=ids[0] if asked.is_scored else None,
        )
        return await self._answered("completions", request, served, ids, asked, wire)

    async def _answered(
        self,
        endpoint: str,
        request: Request,
        served: ServedModel,
        ids: list[int],
        asked: ChatRequest | TextRequest,
        wire: Wire,
    ) -> Any:
        """Let the model answer, and send what it answers."""
        wishes, delivery = asked.wishes, asked.delivery
        visit, mailbox = visit_of(request.scope), Mailbox()
        most_tokens = self._most_tokens(served, ids, wishes)
        _check_bias(wishes, served)
        grammar = None
        # Last, as it may take seconds.
        if wishes.format is not None:
            begin = partial(served.grammars.begin, wishes.format)
            grammar = await self._grammars_begun.do(begin)
        # Tokens that are scored come one by one behind the first, which nothing is before.
        given: tuple[Given, ...] = ()
        if isinstance(asked, TextRequest) and asked.is_scored:
            given = await run_in_threadpool(_given, served, ids)
        job = Job(
            prompt_ids=ids[: len(ids) - len(given)],
            wishes=wishes,
            most_tokens=most_tokens,
            tenant=visit.tenant,
            tell=mailbox.put,
            deadline=time.monotonic() + self._rules.seconds,
            grammar=grammar,
            endpoint=endpoint,
            trace_parent=request.headers.get("traceparent"),
            given=given,
            before=tuple(ids[-_SEEN_BEFORE:]) if isinstance(asked, TextRequest) else (),
        )
        visit.notes |= {"prompt_tokens": len(ids), "work": job.number}
        if delivery.unknown:
            visit.notes["unknown_fields"] = [name[:60] for name in delivery.unknown[:20]]
        self._inference.submit(job)

        def gone() -> None:
            visit.notes["gone"] = True

        if delivery.streamed:
            return AnswerStream(
                job,
                mailbox,
                wire,
                told_usage=delivery.told_usage,
                ping_seconds=self._rules.ping_seconds,
                on_gone=gone,
            )
        work = asyncio.ensure_future(whole_answer(job, mailbox, wire))
        try:
            return JSONResponse(await beside_client(work, job, request.receive))
        except GoneError:
            gone()
            raise gone_error() from None

    def _most_tokens(self, served: ServedModel, ids: Sequence[int], wishes: AnswerWishes) -> int:
        """Return how long an answer may get; ApiError where it does not fit the context."""
        context = served.context_tokens
        room = context - len(ids)
        most = wishes.most_tokens
        if room < (1 if most is None else most):
            wanted = "" if most is None else f" and {most} of the answer"
            raise ApiError(
                400,
                f"{len(ids)} tokens of the prompt{wanted} are more than the {context} that this "
                "model's context has here: shorten the prompt or lower max_tokens",
                "context_length_exceeded",
                param="messages" if most is None else "max_tokens",
            )
        return min(self._rules.answer_tokens, room) if most is None else most

    def _named(self, name: str | None) -> ServedModel:
        """Return the model of a name, of any where None; ApiError where it is another's."""
        served = self._inference.served
        if name is not None and name != served.name:
            raise ApiError(
                404,
                f"there is no model of that name here: this server has {served.name}",
                "model_not_found",
                param="model",
            )
        return served


async def _read(request: Request, read: Callable[[dict[str, Any]], _Asked]) -> _Asked:
    """Return what a body asks for."""
    body = await _body(request)
    if len(body) < _LARGE_BYTES:
        return read(parsed(body))
    # It takes seconds, in which others are answered.
    return await run_in_threadpool(lambda: read(parsed(body)))


async def _body(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(request.body(), BODY_SECONDS)
    except TimeoutError:
        raise late() from None


def _text(served: ServedModel, fields: Fields) -> Response:
    """Return what tells the text of a request's tokens; of many it takes seconds."""
    given = fields.take("tokens")
    if not isinstance(given, list) or not all(type(one) is int and one >= 0 for one in given):
        raise fields.wrong("tokens", given, "a list of tokens")
    ids = served.prompts.known(given) if given else []
    return JSONResponse({"prompt": served.prompts.text_of(ids)})


def _prompt(served: ServedModel, asked: TextRequest) -> tuple[list[int], str]:
    """Return the tokens of a prompt, and what of it is repeated; of many it takes seconds."""
    if isinstance(asked.prompt, str):
        return served.prompts.of_text(asked.prompt), asked.prompt if asked.echo else ""
    ids = served.prompts.known(asked.prompt)
    return ids, served.prompts.text_of(ids) if asked.echo else ""


def _given(served: ServedModel, ids: Sequence[int]) -> tuple[Given, ...]:
    """Return the tokens of a prompt behind its first, with where each one's text begins."""
    prompts = served.prompts
    texts = [len(prompts.text_of(ids[:1])), *(len(prompts.piece_of(one)) for one in ids[1:])]
    begins = accumulate(texts[:-1])
    whole = sum(texts)
    return tuple(Given(one, begin - whole) for one, begin in zip(ids[1:], begins, strict=True))


def _check_bias(wishes: AnswerWishes, served: ServedModel) -> None:
    if any(token_id >= served.words for token_id, _ in wishes.bias):
        raise invalid(
            f"logit_bias has a token above {served.words - 1}, the model's last", "logit_bias"
        )


# --- The application ---


def application(routes: Routes, files: FileRoutes, rules: ServerRules, log: Log) -> Gate:
    """Return the routes as an application of ASGI, behind its gate."""
    app = FastAPI(
        title="HillInfer",
        version=own_version(),
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    told: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: _told,
        HillInferError: _logged(log),
        HTTPException: _of_http,
        ClientDisconnect: _left,
        # The gate logs it.
        Exception: _defect,
    }
    for kind, handler in told.items():
        app.add_exception_handler(kind, handler)
    for path, get in (
        ("/", Page().show),
        ("/health", routes.health),
        ("/version", routes.version),
        ("/metrics", routes.metrics),
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/tokenizer_info", routes.tokenizer_info),
        ("/v1/files", files.list),
        ("/v1/files/{name}", files.tell),
        ("/v1/files/{name}/content", files.content),
    ):
        app.add_api_route(path, get, methods=["GET"], response_model=None)
    for path, post in (
        ("/v1/chat/completions", routes.chat),
        ("/v1/completions", routes.text),
        ("/tokenize", routes.tokenize),
        ("/detokenize", routes.detokenize),
        ("/load_model", routes.load),
        ("/v1/files", files.create),
    ):
        app.add_api_route(
            path,
            post,
            methods=["POST"],
            response_model=None,
            openapi_extra=body_of(path, rules.alias),
        )
    app.add_api_route("/v1/files/{name}", files.remove, methods=["DELETE"], response_model=None)
    return Gate(app, rules, log)


def _response(error: ApiError) -> Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(error.as_json(), error.status, headers)


async def _told(request: Request, error: ApiError) -> Response:
    return _response(error)


def _logged(log: Log) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def logged(request: Request, error: Exception) -> Response:
        visit: Visit = visit_of(request.scope)
        told = api_error(error)
        if told.status >= 500:
            log.failure("failed", error, {"request": visit.name})
        return _response(told)

    return logged


async def _left(request: Request, error: ClientDisconnect) -> Response:
    """Note that a client left before its body was there, which is no failure of this server."""
    visit_of(request.scope).notes["gone"] = True
    return _response(gone_error())


async def _defect(request: Request, error: Exception) -> Response:
    return _response(api_error(error))


async def _of_http(request: Request, error: HTTPException) -> Response:
    """Tell of paths and methods that there are not."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    said = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _response(ApiError(error.status_code, said, code))


class Page:
    """Gives the page at `/` out: one file, which runs its own script and loads nothing else."""

    def __init__(self) -> None:
        self._text = _PAGE.read_text(encoding="utf-8")
        script = re.search(r"<script>(.*?)</script>", self._text, re.DOTALL)
        style = re.search(r"<style>(.*?)</style>", self._text, re.DOTALL)
        assert script is not None
        assert style is not None
        policy = (
            f"default-src 'none'; script-src {_hash(script[1])}; style-src {_hash(style[1])}; "
            "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
        )
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    async def show(self) -> Response:
        """`GET /`."""
        return HTMLResponse(self._text, headers=self._headers)


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
