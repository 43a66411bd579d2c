# SPDX-License-Identifier: Apache-2.0
"""Text from tokens as they come, without ever showing half a character."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes a growing list of tokens piece by piece.

    A character may be spread over several tokens and a token's text may depend on the one before
    it, so each piece is the difference of two decodings that start at the same token, and is held
    back while it ends in an incomplete character.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is certain now, maybe none."""
        self._ids.append(token_id)
        return self._take(self._text(self._start, len(self._ids)), _REPLACEMENT)

    def finish(self) -> str:
        """Return what was held back."""
        return self._take(self._text(self._start, len(self._ids)), None)

    def _take(self, text: str, unfinished: str | None) -> str:
        before = self._text(self._start, self._shown)
        if len(text) <= len(before) or (unfinished and text.endswith(unfinished)):
            return ""
        # The next difference starts at the tokens shown now, so each step decodes a few tokens.
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def _text(self, begin: int, end: int) -> str:
        return str(
            self._tokenizer.decode(
                self._ids[begin:end],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        )
