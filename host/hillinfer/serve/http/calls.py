# SPDX-License-Identifier: Apache-2.0
"""Answers that may be calls of functions, as OpenAI's objects."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from hillinfer.serve.answers import STOP, Piece
from hillinfer.serve.formats.asked_format import read_call
from hillinfer.serve.http.wire import ChatWire, Head
from hillinfer.serve.jobs import Usage
from hillinfer.serve.served_model import ServedModel

CALLS = "tool_calls"


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
            self._chunk(piece.choice, {}, None, CALLS),
        ]

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """Return the object of an answer that is not streamed."""
        made = super().whole(pieces, usage)
        for choice in made["choices"]:
            message = choice["message"]
            call = read_call(message["content"]) if choice["finish_reason"] == STOP else None
            if call is not None:
                message |= {"content": None, "tool_calls": [_told(call)]}
                choice["finish_reason"] = CALLS
        return made


def _told(call: tuple[str, str]) -> dict[str, Any]:
    name, arguments = call
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
