# SPDX-License-Identifier: Apache-2.0
"""OpenAI's objects, made of what answers bring."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hillinfer.serve.answers import STOP, Chosen, Likely, Piece
from hillinfer.serve.formats import read_call
from hillinfer.serve.jobs import Usage
from hillinfer.serve.served_model import ServedModel

_CALLS = "tool_calls"

# --- Usage ---


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return what a request took, OpenAI's numbers and ours."""
    first = usage.first_token_seconds
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.answer_tokens,
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "hillinfer": {
            "queue_ms": _milliseconds(usage.queue_seconds),
            "ttft_ms": None if first is None else _milliseconds(first),
            "decode_tokens_per_second": round(usage.tokens_per_second, 3),
            "hot_hit_rate": round(usage.hot_hit_rate, 4),
            "drive_read_bytes": usage.drive_read_bytes,
            "drive_wait_ms": _milliseconds(usage.drive_wait_seconds),
        },
    }


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)


# --- Answers of both routes ---


@dataclass(frozen=True)
class Head:
    """What all objects of one answer begin with.

    Parameters
    ----------
    model
        As the client named it.
    name
        Of this answer.
    created
        Seconds since 1970.
    """

    model: str
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


class Wire(Protocol):
    """Makes the objects of one route."""

    def first(self, choice: int) -> dict[str, Any] | None:
        """Return what a stream of an answer begins with; None for nothing."""

    def chunk(self, piece: Piece) -> list[dict[str, Any]]:
        """Return what a stream sends for a piece."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return what a stream sends of usage."""

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """Return all answers at once, given the pieces of each."""


class ChatWire:
    """Objects of `/v1/chat/completions`.

    Parameters
    ----------
    head
        Of the answer.
    served
        Whose tokens they are.
    logprobs
        Whether they are told.
    usage
        Whether each chunk of a stream has the field.
    """

    def __init__(
        self, head: Head, served: ServedModel, *, logprobs: bool, told_usage: bool
    ) -> None:
        self._head, self._tokens = head, TokenTexts(served)
        self._logprobs, self._told_usage = logprobs, told_usage
        self._begun: set[int] = set()

    def first(self, choice: int) -> dict[str, Any]:
        """Return the chunk with the role."""
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, piece: Piece) -> list[dict[str, Any]]:
        """Return chunks of text, and one of its end."""
        made = []
        if piece.text or (self._logprobs and piece.tokens):
            logprobs = self._logprobs_of([piece])
            made.append(self._chunk(piece.choice, {"content": piece.text}, logprobs, None))
        if piece.finish is not None:
            made.append(self._chunk(piece.choice, {}, None, piece.finish))
        return made

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return the chunk without choices."""
        return self._object("chat.completion.chunk", []) | {"usage": usage_object(usage)}

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """Return the object of an answer that is not streamed."""
        choices = [
            {
                "index": number,
                "message": {
                    "role": "assistant",
                    "content": "".join(piece.text for piece in own),
                    "refusal": None,
                },
                "logprobs": self._logprobs_of(own),
                "finish_reason": own[-1].finish,
            }
            for number, own in enumerate(pieces)
        ]
        return self._object("chat.completion", choices) | {"usage": usage_object(usage)}

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish: str | None,
    ) -> dict[str, Any]:
        made = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = self._object("chat.completion.chunk", [made])
        return chunk | {"usage": None} if self._told_usage else chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._head.name}",
            "object": kind,
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }

    def _logprobs_of(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        told = [self._token(piece.choice, one) for piece in pieces for one, _ in piece.tokens]
        return {"content": told, "refusal": None}

    def _token(self, choice: int, chosen: Chosen) -> dict[str, Any]:
        # A chat's answer is a text of its own, which its first token begins.
        text_of = self._tokens.text if choice in self._begun else self._tokens.first
        self._begun.add(choice)
        top = [self._likely(one, text_of(one.token_id)) for one in chosen.top]
        own = Likely(chosen.token_id, chosen.logprob)
        return self._likely(own, text_of(own.token_id)) | {"top_logprobs": top}

    @staticmethod
    def _likely(one: Likely, text: str) -> dict[str, Any]:
        # A part of a character has no text of its own.
        own = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": one.logprob, "bytes": own}


class CallWire(ChatWire):
    """Objects of chats with tools.

    An answer that begins with a brace is a call: it is sent at its end, in one chunk. Words come as
    they are made. A call that did not get to its end is told as the text that it is.

    Parameters as in `ChatWire`.
    """

    def __init__(
        self, head: Head, served: ServedModel, *, logprobs: bool, told_usage: bool
    ) -> None:
        super().__init__(head, served, logprobs=logprobs, told_usage=told_usage)
        self._held: dict[int, list[Piece]] = {}
        self._in_words: set[int] = set()

    def chunk(self, piece: Piece) -> list[dict[str, Any]]:
        """Return chunks of text, or of a call that is whole, and one of its end."""
        if piece.choice in self._in_words:
            return super().chunk(piece)
        held = self._held.setdefault(piece.choice, [])
        held.append(piece)
        text = "".join(one.text for one in held)
        if piece.finish is None and (not text or text.startswith("{")):
            return []
        call = read_call(text) if piece.finish == STOP else None
        if call is None:
            self._in_words.add(piece.choice)
            return [chunk for one in held for chunk in super(CallWire, self).chunk(one)]
        delta = {"tool_calls": [{"index": 0, **_told(call)}]}
        return [
            self._chunk(piece.choice, delta, self._logprobs_of(held), None),
            self._chunk(piece.choice, {}, None, _CALLS),
        ]

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """Return the object of an answer that is not streamed."""
        made = super().whole(pieces, usage)
        for choice in made["choices"]:
            message = choice["message"]
            call = read_call(message["content"]) if choice["finish_reason"] == STOP else None
            if call is not None:
                message |= {"content": None, "tool_calls": [_told(call)]}
                choice["finish_reason"] = _CALLS
        return made


def _told(call: tuple[str, str]) -> dict[str, Any]:
    name, arguments = call
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


class TextWire:
    """Objects of `/v1/completions`.

    Parameters
    ----------
    head, served, logprobs, told_usage
        As in `ChatWire`.
    echo
        What each answer begins with: the prompt, or nothing.
    first_id
        The prompt's first token where log-probabilities of its tokens are told: nothing is before
        it, so that it has none. None where they are not.
    """

    def __init__(
        self,
        head: Head,
        served: ServedModel,
        *,
        logprobs: bool,
        told_usage: bool,
        echo: str = "",
        first_id: int | None = None,
    ) -> None:
        self._head, self._tokens = head, TokenTexts(served)
        self._logprobs, self._told_usage, self._echo = logprobs, told_usage, echo
        self._first_id = first_id

    def first(self, choice: int) -> dict[str, Any] | None:
        """Return a chunk with the prompt where it is repeated."""
        if not self._echo and self._first_id is None:
            return None
        logprobs = None if self._first_id is None else self._with_first(self._logprobs_of([]))
        return self._chunk(choice, self._echo, logprobs, None)

    def chunk(self, piece: Piece) -> list[dict[str, Any]]:
        """Return chunks of text, and one of its end."""
        made = []
        if piece.text or (self._logprobs and piece.tokens):
            logprobs = self._logprobs_of([piece])
            made.append(self._chunk(piece.choice, piece.text, logprobs, None))
        if piece.finish is not None:
            made.append(self._chunk(piece.choice, "", None, piece.finish))
        return made

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return the chunk without choices."""
        return self._object([]) | {"usage": usage_object(usage)}

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """Return the object of an answer that is not streamed."""
        choices = [
            {
                "index": number,
                "text": self._echo + "".join(piece.text for piece in own),
                "logprobs": self._with_first(self._logprobs_of(own)),
                "finish_reason": own[-1].finish,
            }
            for number, own in enumerate(pieces)
        ]
        return self._object(choices) | {"usage": usage_object(usage)}

    def _chunk(
        self, choice: int, text: str, logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        made = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        chunk = self._object([made])
        return chunk | {"usage": None} if self._told_usage else chunk

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._head.name}",
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }

    def _logprobs_of(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        told = [one for piece in pieces for one in piece.tokens]
        text = self._tokens.text
        return {
            "tokens": [text(chosen.token_id) for chosen, _ in told],
            "token_logprobs": [chosen.logprob for chosen, _ in told],
            "top_logprobs": [self._top(chosen) for chosen, _ in told],
            "text_offset": [len(self._echo) + begin for _, begin in told],
        }

    def _top(self, chosen: Chosen) -> dict[str, float]:
        """Return the likeliest tokens, and behind them the one that came where it is none."""
        likely = (*chosen.top, Likely(chosen.token_id, chosen.logprob))
        told: dict[str, float] = {}
        for one in likely:
            # Tokens may have the same text: the likeliest of them is told.
            told.setdefault(self._tokens.text(one.token_id), one.logprob)
        return told

    def _with_first(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        if logprobs is None or self._first_id is None:
            return logprobs
        first = {
            "tokens": self._tokens.first(self._first_id),
            "token_logprobs": None,
            "top_logprobs": None,
            "text_offset": 0,
        }
        return {name: [first[name], *of_others] for name, of_others in logprobs.items()}


class TokenTexts:
    """Texts of single tokens, as log-probabilities name them."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._known: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the text of one token that others come before."""
        if token_id not in self._known:
            self._known[token_id] = self._served.prompts.piece_of(token_id)
        return self._known[token_id]

    def first(self, token_id: int) -> str:
        """Return the text of a token that a text begins with."""
        return self._served.prompts.text_of([token_id])


# --- Streams ---

LAST = b"data: [DONE]\n\n"


def event(told: dict[str, Any]) -> bytes:
    """Return an object as an event of a stream."""
    return (
        b"data: " + json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def comment(text: str) -> bytes:
    """Return a comment, which clients skip."""
    return f": {text}\n\n".encode()
