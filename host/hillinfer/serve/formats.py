# SPDX-License-Identifier: Apache-2.0
"""Texts that an answer may be: `response_format`, `tools` and `tool_choice` as a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hillinfer.serve.fields import Fields, checked_text
from hillinfer.serve.refusals import ApiError, invalid

_MOST_TOOLS, _MOST_SCHEMA_BYTES = 128, 256 << 10
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# As most JSON is written that models have read; free space could go on without an end.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object"}
_CALL_KEYS = ["name", "arguments"]
# Keywords of JSON schema whose values are data, and those whose values have schemas by names.
_DATA = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True)
class AskedFormat:
    """Which texts an answer may be.

    Parameters
    ----------
    grammar
        A Lark grammar, as llguidance reads it.
    param
        The field that asked for it.
    may_call
        Whether an answer that begins with a brace is the call of a function.
    """

    grammar: str
    param: str
    may_call: bool = False


@dataclass(frozen=True)
class Function:
    """A function that the model may call.

    Parameters
    ----------
    name, description
        As the client gave them.
    parameters
        JSON schema of an object.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    def told(self) -> str:
        """Return what the model is told of it; ApiError where it is nested too deeply."""
        said = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        try:
            return json.dumps(said, ensure_ascii=False)
        except RecursionError as error:
            raise _too_deep("tools") from error

    def call(self, place: str) -> dict[str, Any]:
        """Return the schema of a call, which lies at a place of the whole schema: a JSON pointer.

        Raises
        ------
        ApiError
            Where it is nested too deeply.
        """
        try:
            arguments = _moved(dict(self.parameters), f"{place}/properties/arguments")
        except RecursionError as error:
            raise _too_deep("tools") from error
        return {
            "type": "object",
            "properties": {"name": {"const": self.name}, "arguments": arguments},
            "required": _CALL_KEYS,
            "additionalProperties": False,
        }


@dataclass(frozen=True)
class Tools:
    """Functions of a request.

    Parameters
    ----------
    functions
        Those that may be called; none where there are no tools, or none is to be called.
    required
        Whether the answer must be a call.
    """

    functions: tuple[Function, ...] = ()
    required: bool = False

    def instruction(self) -> str:
        """Return what a model is told, whatever its chat template knows of tools."""
        lines = [
            "You can call functions. To call one, answer with nothing but a JSON object:",
            '{"name": the name of the function, "arguments": an object with its parameters}',
        ]
        if not self.required:
            lines.append("Where no call is needed, answer in words.")
        return "\n".join([*lines, "The functions are:", *(one.told() for one in self.functions)])

    def format(self) -> AskedFormat:
        """Return the grammar of answers."""
        calls = {
            "anyOf": [one.call(f"#/anyOf/{place}") for place, one in enumerate(self.functions)]
        }
        if self.required:
            return AskedFormat(f"start: {_json(calls, 'tools')}\n", "tools", may_call=True)
        # Words do not begin with a brace, so the first letter says which it is.
        grammar = f"start: call | words\ncall: {_json(calls, 'tools')}\nwords: /([^{{](.|\\n)*)?/\n"
        return AskedFormat(grammar, "tools", may_call=True)


def asked_tools(fields: Fields) -> Tools:
    """Return what `tools` and `tool_choice` ask for.

    Raises
    ------
    ApiError
        Where one is wrong, or asks for what is no function.
    """
    given, choice = fields.take("tools"), fields.take("tool_choice")
    if given is None or given == []:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools: name the functions there", "tool_choice")
        return Tools()
    if not isinstance(given, list) or len(given) > _MOST_TOOLS:
        raise fields.wrong("tools", given, f"a list of at most {_MOST_TOOLS} functions")
    functions = [_function(one, f"tools[{place}].") for place, one in enumerate(given)]
    if len({one.name for one in functions}) < len(functions):
        raise invalid("tools name a function twice", "tools")
    if choice == "none":
        return Tools()
    if choice in (None, "auto"):
        return Tools(tuple(functions))
    if choice == "required":
        return Tools(tuple(functions), required=True)
    if not isinstance(choice, dict):
        raise fields.wrong("tool_choice", choice, "none, auto, required or a function")
    named = Fields(choice, "tool_choice.")
    named.only("type", ("function",))
    name = named.inner("function").text("name")
    wanted = tuple(one for one in functions if one.name == name)
    if not wanted:
        raise invalid("tool_choice names no function of tools", "tool_choice")
    return Tools(wanted, required=True)


def asked_format(fields: Fields, tools: Tools) -> AskedFormat | None:
    """Return which texts answers may be; None for any.

    Raises
    ------
    ApiError
        Where `response_format` is wrong, or asks for another form than the tools.
    """
    given = fields.inner("response_format")
    kind = given.text("type")
    if kind in (None, "text"):
        return tools.format() if tools.functions else None
    if tools.functions:
        raise ApiError(
            400,
            "response_format beside tools is not supported: leave one out",
            "unsupported_value",
            param="response_format",
        )
    if kind == "json_object":
        return AskedFormat(f"start: {_json(_ANY_OBJECT, 'response_format')}\n", "response_format")
    if kind != "json_schema":
        raise given.wrong("type", kind, "text, json_object or json_schema")
    inner = given.inner("json_schema")
    schema = inner.take("schema")
    if not isinstance(schema, dict):
        raise inner.wrong("schema", schema, "an object")
    for field in ("name", "description", "strict"):
        inner.take(field)
    return AskedFormat(f"start: {_json(schema, 'response_format')}\n", "response_format")


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[Mapping[str, Any]]:
    """Return the messages of a chat, with what the model is told of functions."""
    if not tools.functions:
        return list(messages)
    said = tools.instruction()
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{said}"}, *others]
    return [{"role": "system", "content": said, "files": []}, *messages]


def calls_as_text(given: object, place: str) -> str:
    """Return calls that an assistant's message has, as the model wrote them.

    Raises
    ------
    ApiError
        Where they are no calls of functions.
    """
    if not isinstance(given, list) or not given:
        raise invalid(f"{place[:-1]} must be a list of calls", place[:-1])
    texts = []
    for number, one in enumerate(given):
        own = f"{place[:-1]}[{number}]."
        if not isinstance(one, dict):
            raise invalid(f"{own[:-1]} must be an object", own[:-1])
        fields = Fields(one, own)
        fields.only("type", ("function",))
        function = fields.inner("function")
        name, arguments = function.text("name"), function.text("arguments")
        if name is None or arguments is None:
            raise function.wrong("name", name, "a string, and so must arguments")
        texts.append(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}')
    return "\n".join(texts)


def read_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call; None where a text is none, or not all of one."""
    if not text.startswith("{"):
        return None
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or sorted(call) != sorted(_CALL_KEYS):
        return None
    return str(call["name"]), json.dumps(call["arguments"], ensure_ascii=False)


def _function(given: object, place: str) -> Function:
    if not isinstance(given, dict):
        raise invalid(f"{place[:-1]} must be an object", place[:-1])
    tool = Fields(given, place)
    tool.only("type", ("function",))
    fields = tool.inner("function")
    name = fields.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise fields.wrong("name", name, "1 to 64 letters, digits, _ and -")
    parameters = fields.take("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise fields.wrong("parameters", parameters, "an object")
    if parameters.get("type", "object") != "object":
        raise invalid(f"{place}function.parameters must be the schema of an object", "tools")
    fields.take("strict")
    # Where nothing says so, any value would be one: clients read arguments as objects.
    parameters = {"type": "object", **parameters}
    return Function(name, fields.text("description") or "", parameters)


def _too_deep(param: str) -> ApiError:
    return invalid(f"{param} is nested too deeply", param)


def _moved(schema: Any, place: str) -> Any:
    """Return a schema that lies within another one: what it refers to in itself lies there too."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict) or "$id" in schema:
        # With a name of its own it is found wherever it lies.
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.split("/")[0] == "#":
            made[key] = place + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            made[key] = {name: _moved(one, place) for name, one in value.items()}
        else:
            made[key] = value if key in _DATA else _moved(value, place)
    return made


def _json(schema: Mapping[str, Any], param: str) -> str:
    """Return a schema as Lark has it.

    Raises
    ------
    ApiError
        Where it is very long or has half a character.
    """
    own = {**schema, "x-guidance": _SPACES}
    try:
        text = checked_text(json.dumps(own, ensure_ascii=False), param)
    except RecursionError as error:
        raise _too_deep(param) from error
    if len(text) > _MOST_SCHEMA_BYTES:
        raise invalid(f"{param} has more than {_MOST_SCHEMA_BYTES} characters", param)
    return f"%json {text}"
