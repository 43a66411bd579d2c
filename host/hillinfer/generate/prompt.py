# SPDX-License-Identifier: Apache-2.0
"""Token ids of a document and of questions about it, so that the document's come first."""

from __future__ import annotations

import os
import secrets
import stat
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from hillinfer.errors import PromptError
from hillinfer.generate.chat_templates import rendered_chats
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
    """Return bytes as text, a byte order mark left out.

    Raises PromptError where they are not UTF-8.
    """
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
