# SPDX-License-Identifier: Apache-2.0
"""The routes of files, as OpenAI has them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from hillinfer.serve.documents import Documents
from hillinfer.serve.fields import checked_text
from hillinfer.serve.http.gate import BODY_SECONDS, late, visit_of
from hillinfer.serve.refusals import invalid
from hillinfer.serve.rules import ServerRules

_PURPOSES = ("user_data", "assistants")
_MOST_FIELDS = 8
_MULTIPART = "multipart/form-data"


class FileRoutes:
    """Takes, tells of and forgets files; each key has its own.

    Parameters
    ----------
    documents
        The files.
    rules
        Of the server.
    """

    def __init__(self, documents: Documents, rules: ServerRules) -> None:
        self._documents, self._rules = documents, rules

    async def create(self, request: Request) -> Response:
        """`POST /v1/files`: take a file, and begin to read it."""
        form = await self._form(request)
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise invalid("file is missing", "file", "missing_field")
        if purpose not in _PURPOSES:
            raise invalid(f"purpose must be one of {', '.join(_PURPOSES)}", "purpose")
        data, visit = await file.read(), visit_of(request.scope)
        visit.notes["file_bytes"] = len(data)
        # A client says how its names are to be read, and may have said what no answer can tell.
        name = checked_text(file.filename or "file", "file")
        made = await run_in_threadpool(self._documents.add, name, data, visit.tenant)
        return JSONResponse(made.as_json())

    async def list(self, request: Request) -> Response:
        """`GET /v1/files`."""
        found = self._documents.of_tenant(visit_of(request.scope).tenant)
        told: dict[str, Any] = {
            "object": "list",
            "data": [one.as_json() for one in found],
            "has_more": False,
        }
        return JSONResponse(told)

    async def tell(self, request: Request, name: str) -> Response:
        """`GET /v1/files/ID`."""
        found = self._documents.get(name, visit_of(request.scope).tenant)
        return JSONResponse(found.as_json())

    async def content(self, request: Request, name: str) -> Response:
        """`GET /v1/files/ID/content`."""
        return PlainTextResponse(self._documents.content(name, visit_of(request.scope).tenant))

    async def remove(self, request: Request, name: str) -> Response:
        """`DELETE /v1/files/ID`."""
        tenant = visit_of(request.scope).tenant
        await run_in_threadpool(self._documents.remove, name, tenant)
        return JSONResponse({"id": name, "object": "file", "deleted": True})

    async def _form(self, request: Request) -> FormData:
        if not request.headers.get("content-type", "").startswith(_MULTIPART):
            raise invalid(f"files come as {_MULTIPART}", code="unsupported_value")
        async with aclosing(request.stream()) as stream:
            parser = MultiPartParser(request.headers, stream, max_files=1, max_fields=_MOST_FIELDS)
            # A document of a client lies in no temporary file.
            parser.spool_max_size = self._rules.body_bytes
            try:
                return await asyncio.wait_for(parser.parse(), BODY_SECONDS)
            except TimeoutError:
                raise late() from None
            except MultiPartException as error:
                raise invalid(f"the form cannot be read: {error.message}") from error
            except (KeyError, ValueError) as error:
                raise invalid("the form cannot be read") from error
