# SPDX-License-Identifier: Apache-2.0
"""Tokens of chats and texts, in which special tokens of the user's are characters."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hillinfer.generate.prompt import TemplateError, TemplateProcess, rendered_turns
from hillinfer.generate.special_tokens import MaskedText, SpecialTokens, TextEncoder
from hillinfer.serve.refusals import ApiError, invalid

_BORDER_BYTES = 16
# Tokenizers may leave out characters, such as repeated spaces, before they look for tokens.
_FEWER_CHARACTERS = 16


class PromptTokens:
    """Makes tokens of what clients send; any thread may use it.

    Parameters
    ----------
    tokenizer
        One of transformers.
    words
        How many tokens the model has rows of its embedding for.
    context_tokens
        Most tokens of a prompt and its answer.
    """

    def __init__(self, tokenizer: Any, words: int, context_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer, SpecialTokens.TEXT)
        self._words, self._context_tokens = words, context_tokens
        longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._most_letters = context_tokens * longest * _FEWER_CHARACTERS
        # Parts of what encodes are made at its first use.
        self._lock = threading.Lock()
        self._templates = TemplateProcess()

    @property
    def has_template(self) -> bool:
        """Whether the model knows chats."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def of_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a chat, up to where the answer begins.

        Of a single turn of the user's they are those of `hillinfer generate --prompt`. Where the
        template takes no system message, its text begins the user's first turn.

        Raises
        ------
        ApiError
            Where the model has no chat template, or one that does not take the chat, or the chat is
            far too long.
        HillInferError
            Where the template does not keep the texts.
        """
        if not self.has_template:
            raise ApiError(
                400,
                "this model has no chat template: send its prompt to /v1/completions",
                "no_chat_template",
            )
        if len(messages) > self._context_tokens:
            # Each has a token of the template's at least.
            raise _too_long(f"a chat of {len(messages)} messages", self._context_tokens)
        self.check_letters(sum(len(one["content"]) for one in messages))
        try:
            chat = self._rendered(messages)
        except TemplateError as error:
            chat = self._rendered_otherwise(messages, error)
        with self._lock:
            return self._checked(self._encoder.ids(chat, False))  # noqa: FBT003

    def of_text(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around unless told not.

        Errors as of `of_chat`.
        """
        self.check_letters(len(text))
        with self._lock:
            return self._checked(self._encoder.ids(self._encoder.mask(text), special))

    def known(self, ids: Sequence[int]) -> list[int]:
        """Return tokens that a client made by itself.

        Raises
        ------
        ApiError
            Where one is none of the model's, or they are more than its context holds.
        """
        if len(ids) > self._context_tokens:
            # To make a text of very many takes seconds in which nobody else is answered.
            raise _too_long(f"a list of {len(ids)} tokens", self._context_tokens)
        if max(ids) >= self._words:
            raise invalid(f"prompt has a token above {self._words - 1}, the model's last", "prompt")
        return list(ids)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones too; waits for nobody."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def piece_of(self, token_id: int) -> str:
        """Return the text of one token inside a text; waits for nobody.

        Some decoders leave out the space that a text begins with: behind itself a token has it.
        """
        alone, twice = self.text_of([token_id]), self.text_of([token_id, token_id])
        return twice[len(alone) :] if twice.startswith(alone) else alone

    def check_letters(self, letters: int) -> None:
        """Refuse a prompt of so many characters where no tokens are so long; waits for nobody.

        Raises
        ------
        ApiError
            Then.
        """
        if letters > self._most_letters:
            raise _too_long(f"a prompt of {letters} characters", self._context_tokens)

    def close(self) -> None:
        """End the process that renders chats."""
        self._templates.close()

    # --- inside ----------------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> MaskedText:
        """Return the chat as its template has it, special tokens of its texts masked."""
        # Together, so that each masked word stands for one token.
        border = secrets.token_hex(_BORDER_BYTES)
        with self._lock:
            whole = self._encoder.mask(border.join(one["content"] for one in messages))
        parts = [part.text for part in whole.cut(border)]
        harmless = [secrets.token_hex(_BORDER_BYTES) for _ in parts]
        text, other = rendered_turns(
            self._tokenizer, [_with(messages, parts), _with(messages, harmless)], self._templates
        )
        # Nearly all templates keep what is said; then there is nothing to compare.
        kept = [_filled(other, harmless, parts), _filled(other, harmless, _stripped(parts))]
        if text not in kept:
            with self._lock:
                self._encoder.check_same_control(text, other)
        return whole.with_text(text)

    def _rendered_otherwise(
        self, messages: Sequence[Mapping[str, str]], error: TemplateError
    ) -> MaskedText:
        """Return the chat without a system message, where it has one; else tell of the error."""
        others = _without_system(messages)
        if others is not None:
            with suppress(TemplateError):
                return self._rendered(others)
        raise ApiError(
            400,
            f"the chat template of this model does not take this chat ({error.reason}): change its "
            "roles or their order, or send a prompt to /v1/completions",
            "chat_template",
            param="messages",
        ) from error

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise invalid("the prompt has no tokens", code="invalid_prompt")
        if max(ids) >= self._words:
            raise ApiError(
                500,
                "the tokenizer makes tokens that the model does not have: get the model anew",
                "model_failed",
                "server_error",
            )
        return ids


def _too_long(what: str, tokens: int) -> ApiError:
    said = f"{what} is more than {tokens} tokens: shorten it"
    return ApiError(400, said, "context_length_exceeded")


def _without_system(messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]] | None:
    """Return a chat whose system message begins the user's first turn; None where it has none."""
    first, *others = messages
    if first["role"] != "system":
        return None
    if not others or others[0]["role"] != "user":
        return [{**first, "role": "user"}, *others]
    content = f"{first['content']}\n\n{others[0]['content']}"
    return [{**others[0], "content": content}, *others[1:]]


def _with(
    messages: Sequence[Mapping[str, str]], contents: Sequence[str]
) -> list[Mapping[str, str]]:
    pairs = zip(messages, contents, strict=True)
    return [{"role": one["role"], "content": content} for one, content in pairs]


def _stripped(parts: Sequence[str]) -> list[str]:
    return [part.strip() for part in parts]


def _filled(text: str, places: Sequence[str], parts: Sequence[str]) -> str:
    for place, part in zip(places, parts, strict=True):
        text = text.replace(place, part)
    return text
