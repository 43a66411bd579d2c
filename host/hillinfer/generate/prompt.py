# SPDX-License-Identifier: Apache-2.0
"""Prompts: token ids, the document's first, of texts that chat templates make within limits."""

from __future__ import annotations

import json
import os
import secrets
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from hillinfer.errors import HillInferError, PromptError
from hillinfer.generate import chat_template_child
from hillinfer.generate.special_tokens import MaskedText, SpecialTokens, TextEncoder
from hillinfer.values import format_bytes

# --- Documents and questions ---

_SEPARATOR = "\n\n"
_HARMLESS_BYTES = 16
# Any text that no template and no document holds; it only marks where the question goes.
_QUESTION_PLACE = "\u2402hillinfer-question\u2403"


class PromptStyle(StrEnum):
    """Whether the prompt goes through the tokenizer's chat template."""

    AUTO = "auto"
    PLAIN = "plain"


class PromptForm(StrEnum):
    """What a prompt was made as: a style, once it is known whether there is a chat template."""

    CHAT = "chat"
    PLAIN = "plain"

    @classmethod
    def of(cls, tokenizer: Any, style: PromptStyle) -> PromptForm:
        """Return the form that a style takes with a tokenizer."""
        chat = style is PromptStyle.AUTO and bool(getattr(tokenizer, "chat_template", None))
        return cls.CHAT if chat else cls.PLAIN


class QuestionPrompt:
    """Questions about a document that was read before, which itself is not needed.

    `form` is how the document became a prompt, `special_tokens` how those in questions are read.
    Raises PromptError where the chat template does not keep the user's text.
    """

    def __init__(
        self, tokenizer: Any, form: PromptForm, special_tokens: SpecialTokens = SpecialTokens.TEXT
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer, special_tokens)
        self.form = form
        self._before, self._after = self._parts()

    def question_ids(self, question: str) -> list[int]:
        """Return the ids that follow the document's.

        Raises PromptError where the question is empty, or its special tokens cannot be read as
        characters.
        """
        if not question.strip():
            raise PromptError("a question is empty: write it after --question")
        masked = self._encoder.mask(question.strip())
        return self._encoder.ids(masked + self._after.text, add_special_tokens=False)

    def _parts(self) -> tuple[MaskedText, MaskedText]:
        """Return what comes before a question and after it."""
        # What follows a question depends on no document, so any will do.
        return self._around_question(MaskedText("text"))

    def _around_question(self, document: MaskedText) -> tuple[MaskedText, MaskedText]:
        if self.form is PromptForm.PLAIN:
            return document + f"{_SEPARATOR}Question: ", MaskedText("\nAnswer:")
        parts = self._rendered(document + f"{_SEPARATOR}{_QUESTION_PLACE}").cut(_QUESTION_PLACE)
        if len(parts) != 2:
            raise PromptError(
                "the chat template of this model does not keep the user's text: use "
                "--prompt-style plain"
            )
        return parts[0], parts[1]

    def _rendered(self, content: MaskedText) -> MaskedText:
        harmless = secrets.token_hex(_HARMLESS_BYTES)
        text, other = rendered_chats(self._tokenizer, (content.text, harmless))
        # Nearly all templates keep what a user says; then there is nothing to compare.
        if text not in {
            other.replace(harmless, one) for one in (content.text, content.text.strip())
        }:
            self._encoder.check_same_control(text, other)
        return content.with_text(text)


class DocumentPrompt(QuestionPrompt):
    """One document, and any number of questions about it.

    With a chat template, which AUTO uses where the tokenizer has one, document and question share
    one user turn. The text is cut where the question begins and both parts are tokenised by
    themselves, so the document's ids are a prefix of every question's prompt and its cache can be
    forked. `special_tokens` says how those in both are read; the template's own are control tokens
    always.

    Raises PromptError where the document is empty, the chat template does not keep it as it is, or
    special tokens in it cannot be read as characters.
    """

    def __init__(
        self,
        tokenizer: Any,
        document: str,
        style: PromptStyle = PromptStyle.AUTO,
        special_tokens: SpecialTokens = SpecialTokens.TEXT,
    ) -> None:
        if not document.strip():
            raise PromptError("the prompt is empty: give a text with --prompt-file or --prompt")
        self._text = document
        super().__init__(tokenizer, PromptForm.of(tokenizer, style), special_tokens)

    def _parts(self) -> tuple[MaskedText, MaskedText]:
        self._document = self._encoder.mask(self._text)
        return self._around_question(self._document)

    @property
    def spelled_tokens(self) -> tuple[str, ...]:
        """The special tokens in the document that are read as characters, each once, sorted."""
        return tuple(sorted({token.strip() for token in self._document.spans.values()}))

    def alone(self) -> list[int]:
        """Return the ids of the document as the whole prompt."""
        chat = self.form is PromptForm.CHAT
        return self._start_ids(self._rendered(self._document) if chat else self._document)

    def document_ids(self) -> list[int]:
        """Return the ids that every question's prompt starts with."""
        return self._start_ids(self._before)

    def _start_ids(self, text: MaskedText) -> list[int]:
        # A chat template writes its special tokens itself; plain text needs the tokenizer's own.
        return self._encoder.ids(text, add_special_tokens=self.form is PromptForm.PLAIN)


# --- Texts from files and pipes ---

# Fifty million tokens of English and more than any model has positions for.
MOST_BYTES = 256 << 20
_PIECE = 1 << 20


def read_text(file: Path, what: str, option: str) -> str:
    """Return the text in a file.

    A pipe is read to its end; one that nobody writes to is empty. Endless devices end at the
    largest size.

    `what` it is and the `option` that named it are for the error. Raises PromptError where it
    cannot be read, is larger than `MOST_BYTES`, or is not UTF-8.
    """
    try:
        # Without waiting for a writer that may never come.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size > MOST_BYTES:
                raise _too_large(str(file), status.st_size)
            begun = _begun(descriptor)
            os.set_blocking(descriptor, True)
            return decoded(begun + bounded(opened, str(file), len(begun)), str(file))
    except OSError as error:
        raise PromptError(f"cannot read {what} {file}: {error.strerror}; check {option}") from error


def bounded(source: BinaryIO, place: str, already: int = 0) -> bytes:
    """Return all bytes of an open file.

    `source` is in blocking mode, and `already` counts bytes of it that were read before; `place` is
    for the error. Raises PromptError where there are more than `MOST_BYTES`.
    """
    pieces: list[bytes] = []
    while piece := source.read(_PIECE):
        already += len(piece)
        if already > MOST_BYTES:
            raise _too_large(place, already)
        pieces.append(piece)
    return b"".join(pieces)


def decoded(data: bytes, place: str) -> str:
    """Return bytes as text, without a byte order mark; PromptError where they are not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{place} is not UTF-8 text (byte {error.start}): convert it, for example with iconv"
        ) from error


def check_text(text: str, option: str) -> None:
    """Refuse an argument whose bytes are not UTF-8, which Python hands over as half characters.

    Raises PromptError where it holds any.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text after {option} is not UTF-8 (character {error.start}): convert it, for "
            "example with iconv"
        ) from error


def _begun(descriptor: int) -> bytes:
    """Return what is there to read at once; nothing where a writer has not written yet."""
    try:
        return os.read(descriptor, _PIECE)
    except BlockingIOError:
        return b""


def _too_large(place: str, byte_count: int) -> PromptError:
    return PromptError(
        f"{place} has {format_bytes(byte_count)} or more, and no text longer than "
        f"{format_bytes(MOST_BYTES)} is read: give a part of it"
    )


# --- Chat templates, in processes with limits ---

_SECONDS = 60
_SPARE_LETTERS, _TIMES = 1 << 20, 4
_LENGTH = struct.Struct("<Q")


class TemplateError(HillInferError):
    """A model's chat template cannot be used; `reason` says why, and not what a command can do."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


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
        f"the chat template of this model cannot be used ({reason}): use --prompt-style plain",
        reason,
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
            watch, told, size = threading.Timer(_SECONDS, child.kill), b"", -1
            watch.start()
            try:
                child.stdin.write(_LENGTH.pack(len(asked)) + asked)
                child.stdin.flush()
                head = child.stdout.read(_LENGTH.size)
                if len(head) == _LENGTH.size:
                    (size,) = _LENGTH.unpack(head)
                    told = child.stdout.read(size)
            except OSError:
                told = b""
            finally:
                watch.cancel()
                if len(told) != size:
                    # What it tells later would be taken for the answer to the next request.
                    self._child = None
                    child.kill()
                    child.wait()
        if len(told) != size or not told:
            raise _unusable("it takes too long or too much memory")
        return told

    def close(self) -> None:
        """End the process; harmless when done twice."""
        with self._lock:
            self._is_closed, child, self._child = True, self._child, None
        if child is not None:
            child.kill()
            child.communicate()
