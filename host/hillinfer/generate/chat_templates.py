# SPDX-License-Identifier: Apache-2.0
"""Texts that chat templates make, in processes with limits."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hillinfer.errors import HillInferError
from hillinfer.generate import chat_template_child

_SECONDS = 60
_SPARE_LETTERS, _TIMES = 1 << 20, 4
_LENGTH = struct.Struct("<Q")


class TemplateError(HillInferError):
    """A model's chat template cannot be used."""


def rendered_chats(tokenizer: Any, contents: Sequence[str]) -> list[str]:
    """Return the chat of one user turn for each content, up to where the answer begins.

    `contents` is what the user says; otherwise as `rendered_turns`.
    """
    return rendered_turns(tokenizer, [[{"role": "user", "content": one}] for one in contents])


def rendered_turns(
    tokenizer: Any,
    chats: Sequence[Sequence[Mapping[str, str]]],
    ask: Callable[[bytes], bytes] | None = None,
) -> list[str]:
    """Return the text of each chat, up to where the next answer begins.

    The same as `apply_chat_template(..., tokenize=False, add_generation_prompt=True)` for each, but
    in a process of its own with limits. A template is a program that comes with the model: loops in
    loops, a repeated text or a power of numbers run for ever or take all memory, some of them in
    one step that nothing inside the interpreter ends.

    `chats` are messages with `role` and `content`, `tokenizer` one of transformers with a chat
    template; `ask` is a `TemplateProcess`, where None a process is started for this. Raises
    TemplateError where the template fails, takes more than 3 seconds of computing or too much
    memory, or makes far more text than it is given.
    """
    special: dict[str, Any] = dict(tokenizer.special_tokens_map)
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise _unusable(" ".join(str(error).split())[:300]) from error
    if not isinstance(template, str):
        raise _unusable(f"it is {type(template).__name__} and no text")
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **special}
    letters = [sum(len(message["content"]) for message in chat) for chat in chats]
    asked = {
        "template": template,
        "chats": [[dict(message) for message in chat] for chat in chats],
        "variables": variables,
        "most": [_TIMES * count + _SPARE_LETTERS for count in letters],
    }
    told = (ask or _asked_once)(json.dumps(asked, default=str).encode())
    answer: dict[str, Any] = json.loads(told)
    if "error" in answer:
        raise _unusable(" ".join(answer["error"].split()))
    texts: list[str] = answer["texts"]
    return texts


def _asked_once(asked: bytes) -> bytes:
    with _started() as child:
        try:
            out, err = child.communicate(asked, timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise _unusable(f"it takes more than {_SECONDS} seconds") from error
        finally:
            # Also where a signal ended the wait.
            child.kill()
    if child.returncode < 0:
        raise _unusable("it takes too long or too much memory")
    try:
        json.loads(out)
    except ValueError as error:
        said = err.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise _unusable(said[-1][:300]) from error
    return out


def _started(*arguments: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            # Not isolated: jinja2 may lie where a variable says. But not where a user stands, nor
            # in the program's own folder, whose modules are no modules of Python.
            [sys.executable, "-P", chat_template_child.__file__, *arguments],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not arguments else subprocess.DEVNULL,
        )
    except OSError as error:
        raise TemplateError(f"cannot start {sys.executable}: {error.strerror}") from error


def _unusable(reason: str) -> TemplateError:
    return TemplateError(
        f"the chat template of this model cannot be used ({reason}): use --prompt-style plain"
    )


class TemplateProcess:
    """A process that renders chats one after the other, each in a fork of it with limits.

    Starting an interpreter takes far longer than rendering does, and a fork does not. Any thread
    may use it; it is started anew where it ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        with suppress(TemplateError):
            self._child = _started(chat_template_child.AGAIN)

    def __call__(self, asked: bytes) -> bytes:
        """Return what comes of one request; TemplateError where nothing does."""
        with self._lock:
            child = self._child
            if self._is_closed:
                raise TemplateError("chats are rendered no more: the server ends")
            if child is None or child.poll() is not None:
                child = self._child = _started(chat_template_child.AGAIN)
            assert child.stdin is not None
            assert child.stdout is not None
            watch = threading.Timer(_SECONDS, child.kill)
            watch.start()
            try:
                child.stdin.write(_LENGTH.pack(len(asked)) + asked)
                child.stdin.flush()
                head = child.stdout.read(_LENGTH.size)
                told = child.stdout.read(*_LENGTH.unpack(head)) if len(head) == 8 else b""
            except OSError:
                told = b""
            finally:
                watch.cancel()
        if not told:
            raise _unusable("it takes too long or too much memory")
        return told

    def close(self) -> None:
        """End the process; harmless when done twice."""
        with self._lock:
            self._is_closed, child, self._child = True, self._child, None
        if child is not None:
            child.kill()
            child.communicate()
