# SPDX-License-Identifier: Apache-2.0
"""A program that renders a chat template and ends: see `prompt.py`.

It needs jinja2 alone, because transformers takes a second to import. Its environment is that of
transformers 5.23 (`_compile_jinja_template` in `transformers.utils.chat_template_utils`), which a
test compares over templates that use all of it.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

_LENGTH = struct.Struct("<Q")
_CPU_SECONDS = 3
_BYTES = 1 << 30
_BYTES_PER_LETTER = 64
_LETTERS_PER_SECOND = 1 << 24


# What has it answer until nobody asks any more.
AGAIN = "again"


def main() -> None:
    """Read what to render from standard input and write what came of it to standard output."""
    if sys.argv[1:] == [AGAIN]:
        _answer_again()
    else:
        sys.stdout.buffer.write(_answered(sys.stdin.buffer.read()))


def _answer_again() -> None:
    """Answer requests, lengths before them, each in a fork; nothing is told where it was ended."""
    # Before there is anything to do. Without it each answer says so.
    with suppress(ImportError):
        import jinja2.ext
        import jinja2.sandbox  # noqa: F401
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        given = source.read(*_LENGTH.unpack(head))
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                with os.fdopen(writing, "wb") as out:
                    out.write(_answered(given))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as made:
            told = made.read()
        _, status = os.waitpid(child, 0)
        # Of one that was ended by its limits, what it has written is no answer.
        told = told if status == 0 else b""
        target.write(_LENGTH.pack(len(told)) + told)
        target.flush()


def _answered(given: bytes) -> bytes:
    most = _BYTES + _BYTES_PER_LETTER * len(given)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    seconds = _CPU_SECONDS + len(given) // _LETTERS_PER_SECOND
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.loads(given)
    try:
        texts = _rendered(asked["template"], asked["chats"], asked["variables"], asked["most"])
    except Exception as error:  # A template may raise anything; it is told on in one line.
        answer: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:300]}
    else:
        answer = {"texts": texts}
    return json.dumps(answer).encode()


def _rendered(
    template: str,
    chats: list[list[dict[str, str]]],
    variables: dict[str, Any],
    most: list[int],
) -> list[str]:
    compiled = _environment().from_string(template)
    texts = []
    for chat, letters in zip(chats, most, strict=True):
        text = compiled.render(messages=chat, **variables)
        # Refused here, so that whoever asked never holds it.
        if len(text) > letters:
            given = sum(len(message["content"]) for message in chat)
            raise ValueError(f"it makes {len(text)} letters of {given}")
        texts.append(text)
    return texts


def _environment() -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < (3, 1, 6):
        raise ImportError(f"jinja2 {jinja2.__version__} has known ways out of its sandbox")

    class Generation(Extension):
        """`{% generation %}` marks an assistant's text, of which nothing is wanted here."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's way)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_generation_support")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _generation_support(self, caller: Any) -> str:
            return str(caller())

    class PlainDict:
        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args, **kwargs)

    class PlainNamespace(jinja2.utils.Namespace):
        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            values = dict(*args, **kwargs)
            for name in values:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (as transformers has it)
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,  # noqa: FBT001, FBT002
    ) -> str:
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["dict"] = PlainDict()
    environment.globals["namespace"] = PlainNamespace
    return environment


if __name__ == "__main__":
    main()
