# SPDX-License-Identifier: Apache-2.0
"""What `/openapi.json` says of bodies: which fields there are, for people and for fuzzers.

Bodies are read by `hillinfer.serve.requests`, which says more of what is wrong than a schema can.
"""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}


def _number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}


def _whole(low: int, high: int | None = None) -> dict[str, Any]:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def _object(required: list[str], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required}


def _list(items: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


_WISHES = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _whole(-1),
    "seed": {"type": "integer"},
    "stop": {"anyOf": [_TEXT, _list({"type": "string", "minLength": 1}, maxItems=4)]},
    "n": _whole(1, 128),
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100)},
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "max_tokens": _whole(1),
    "stream": _FLAG,
    "stream_options": _object([], include_usage=_FLAG),
    "ignore_eos": _FLAG,
}
_PARTS = _list(
    {
        "anyOf": [
            _object(["type", "text"], type={"const": "text"}, text=_TEXT),
            _object(
                ["type", "file"],
                type={"const": "file"},
                file=_object(["file_id"], file_id=_TEXT),
            ),
        ]
    }
)
_CALLS = _list(
    _object(
        ["function"],
        id=_TEXT,
        type={"const": "function"},
        function=_object(["name", "arguments"], name=_TEXT, arguments=_TEXT),
    )
)
_MESSAGES = _list(
    _object(
        ["role"],
        role={"enum": ["system", "developer", "user", "assistant", "tool"]},
        content={"anyOf": [_TEXT, _PARTS, {"type": "null"}]},
        tool_calls=_CALLS,
        tool_call_id=_TEXT,
    ),
    minItems=1,
)
_FUNCTION = _object(
    ["name"],
    name={"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
    description=_TEXT,
    parameters={"type": "object"},
    strict=_FLAG,
)
_TOOLS = _list(_object(["type", "function"], type={"const": "function"}, function=_FUNCTION))
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _object(
            ["type", "function"],
            type={"const": "function"},
            function=_object(["name"], name=_TEXT),
        ),
    ]
}
_FORMAT = _object(
    ["type"],
    type={"enum": ["text", "json_object", "json_schema"]},
    json_schema=_object(["schema"], name=_TEXT, schema={"type": "object"}, strict=_FLAG),
)
_PROMPT = {"anyOf": [_TEXT, _list(_whole(0), minItems=1)]}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _object(
        ["model", "messages"],
        model=_TEXT,
        messages=_MESSAGES,
        logprobs=_FLAG,
        top_logprobs=_whole(0, 20),
        max_completion_tokens=_whole(1),
        tools=_TOOLS,
        tool_choice=_CHOICE,
        response_format=_FORMAT,
        **_WISHES,
    ),
    "/v1/completions": _object(
        ["model", "prompt"],
        model=_TEXT,
        prompt=_PROMPT,
        logprobs=_whole(0, 5),
        echo=_FLAG,
        **_WISHES,
    ),
    "/tokenize": _object(
        ["model"], model=_TEXT, prompt=_TEXT, messages=_MESSAGES, add_special_tokens=_FLAG
    ),
    "/detokenize": _object(["model", "tokens"], model=_TEXT, tokens=_list(_whole(0))),
    "/load_model": _object(["model"], model=_TEXT),
}
"""Schemas of JSON bodies, by route."""

FORM = _object(["file", "purpose"], file={"type": "string", "format": "binary"}, purpose=_TEXT)
"""Of the form that `POST /v1/files` takes."""


def body_of(path: str, model: str | None) -> dict[str, Any]:
    """Return what OpenAPI says of a route's body; nothing where it has none.

    Parameters
    ----------
    path
        The route.
    model
        The one name that requests may have for it; None where that is not known yet.
    """
    if path in BODIES:
        schema = BODIES[path]
        if model is not None:
            named = {**schema["properties"], "model": {"enum": [model]}}
            schema = {**schema, "properties": named}
        content = {"application/json": {"schema": schema}}
    elif path == "/v1/files":
        content = {"multipart/form-data": {"schema": FORM}}
    else:
        return {}
    return {"requestBody": {"required": True, "content": content}}
