# SPDX-License-Identifier: Apache-2.0
"""A streamed answer that outlives its host: another one answers anew, and goes on behind it.

Whole events are passed on alone. Where the host dies, the request is sent to another one, and its
answer is compared with the text that the client has: as long as both begin alike, what the client
lacks follows. An answer that begins otherwise, as one that is drawn at random may, ends with an
error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_END = b"\n\n"
# What comes in pieces of text: of a completion, or of a message and its thoughts.
_TEXTS = ("text", "reasoning", "reasoning_content", "refusal", "content")
_MOST_WAITING = 16 << 20
DONE = b"data: [DONE]"


class OtherAnswerError(Exception):
    """Another host's answer does not begin with what the client has."""


@dataclass
class StreamedAnswer:
    """What a client has of a streamed answer.

    Parameters
    ----------
    texts
        By number of the choice and by name of the field, such as `content`.
    head
        Fields that all events of an answer have in common, of the first one.
    is_done
        Whether the last event came.
    """

    texts: dict[tuple[int, str], str] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    _ended: set[int] = field(default_factory=set)
    _has_calls: bool = False
    _skipped: dict[tuple[int, str], str] = field(default_factory=dict)
    _waiting: bytes = b""

    def begin_again(self) -> None:
        """Learn that another host answers from here on, from the beginning.

        Raises
        ------
        OtherAnswerError
            Where the client has pieces of calls, which cannot be told apart.
        """
        if self._has_calls:
            raise OtherAnswerError("the client has a part of a call")
        self._skipped, self._waiting = dict(self.texts), b""

    def taken(self, data: bytes) -> Iterator[bytes]:
        """Take what came and yield whole events for the client.

        Raises
        ------
        OtherAnswerError
            Where the answer of another host is another one.
        """
        # Together with what waits: a line's end may be cut between two reads.
        self._waiting = (self._waiting + data).replace(b"\r\n", b"\n")
        if len(self._waiting) > _MOST_WAITING:
            raise OtherAnswerError("an event is too long")
        while _END in self._waiting:
            event, _, self._waiting = self._waiting.partition(_END)
            passed = self._passed(event)
            if passed is not None:
                yield passed + _END

    # --- inside ----------------------------------------------------------------------------

    def _passed(self, event: bytes) -> bytes | None:
        """Return an event as the client gets it; None where it has that already."""
        if event.strip() == DONE:
            self.is_done = True
            return event
        told = _told(event)
        if told is None:
            # Comments, and whatever else is no piece of an answer.
            return event
        # A replica says so, and nothing comes behind it.
        self.is_done |= "error" in told
        choices = told.get("choices") or []
        kept = [one for one in choices if self._is_new(one)]
        if choices and not kept:
            return None
        if not self.head:
            self.head = {name: told[name] for name in ("id", "created", "model") if name in told}
        changed = told | self.head | ({"choices": kept} if choices else {})
        # What was cut off is not in `told` any more.
        return (
            event
            if changed == told and not self._skipped
            else b"data: " + json.dumps(changed).encode()
        )

    def _is_new(self, choice: dict[str, Any]) -> bool:
        """Take a choice's piece and cut off what the client has; False where nothing is left."""
        number = choice.get("index", 0)
        if number in self._ended:
            return False
        delta = choice.get("delta")
        place = choice if delta is None else delta
        pieces = {name: place[name] for name in _TEXTS if isinstance(place.get(name), str)}
        is_behind = self._left(number)
        for name, piece in pieces.items():
            self._take(number, name, piece, place)
        new = any(place[name] for name in pieces)
        is_more = bool(new or choice.get("finish_reason") or place.get("tool_calls"))
        if is_behind:
            if is_more and self._left(number):
                raise OtherAnswerError("the other host's answer is another one, or shorter")
            if not is_more:
                return False
            choice.pop("logprobs", None)
        elif not is_more and _is_beginning(choice) and self._has_text(number):
            return False
        self._has_calls |= bool(place.get("tool_calls"))
        if choice.get("finish_reason"):
            self._ended.add(number)
        return True

    def _take(self, number: int, name: str, piece: str, place: dict[str, Any]) -> None:
        """Leave of a piece what the client has not."""
        left = self._skipped.get((number, name), "")
        if not (left.startswith(piece) or piece.startswith(left)):
            raise OtherAnswerError("the other host's answer is another one")
        if left:
            self._skipped[number, name] = left[len(piece) :]
            place[name] = piece[len(left) :]
        self.texts[number, name] = self.texts.get((number, name), "") + place[name]

    def _left(self, number: int) -> bool:
        """Return whether the client has text of a choice that the other host has not said yet."""
        return any(left for (own, _), left in self._skipped.items() if own == number)

    def _has_text(self, number: int) -> bool:
        return any(text for (own, _), text in self.texts.items() if own == number)


def _is_beginning(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return "role" in delta and not choice.get("finish_reason") and set(delta) <= {"role", "content"}


def _told(event: bytes) -> dict[str, Any] | None:
    if not event.startswith(b"data:"):
        return None
    try:
        told = json.loads(event[len(b"data:") :])
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def error_event(message: str) -> bytes:
    """Return an event that ends an answer with an error."""
    told = {"error": {"message": message, "type": "server_error", "code": "host_lost"}}
    return b"data: " + json.dumps(told).encode() + _END
