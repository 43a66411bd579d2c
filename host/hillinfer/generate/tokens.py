# SPDX-License-Identifier: Apache-2.0
"""Chooses the next token from logits, and turns tokens into text as they come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hillinfer.errors import CacheUseError, SettingsError

if TYPE_CHECKING:
    import torch

# --- The next token ---


# Logits up to 1e8, far beyond any model's, stay float32 numbers when they are divided by it.
_COLDEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0, else drawn from what top-k and top-p leave.

    Raises SettingsError where a value is outside its range. `temperature` divides the logits.
    `top_k` most likely tokens stay, 0 for all, and a probability mass of `top_p`, above 0, at most
    1. The same seed draws the same tokens from the same logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if not 0 <= self.temperature < float("inf"):
            raise SettingsError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if 0 < self.temperature < _COLDEST:
            raise SettingsError(
                f"temperature={self.temperature} leaves no numbers where logits are divided by it: "
                f"use 0, which takes the likeliest token, or {_COLDEST} and more"
            )
        if self.top_k < 0:
            raise SettingsError(f"top_k={self.top_k} must be 0 (all tokens) or above")
        if not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"seed={self.seed} must be between 0 and 2^63 - 1")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise SettingsError(
                "top_k and top_p do nothing at temperature 0 (greedy): set --temperature as well"
            )

    def as_json(self) -> dict[str, float]:
        """Return the choices by name, for a report."""
        return asdict(self)


class TokenChooser:
    """Draws tokens, of logits on a device, one by one, with random numbers of its own."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        import torch
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self._processors: Any = LogitsProcessorList()
        self._random: torch.Generator | None = None
        if sampling.temperature == 0:
            return
        self._random = torch.Generator(device).manual_seed(sampling.seed)
        self._processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._processors.append(TopPLogitsWarper(sampling.top_p))

    def choose(self, logits: torch.Tensor) -> int:
        """Return the id of the next token, given logits of shape (vocabulary,).

        Raises CacheUseError where the greatest of them is no finite number: any token would be as
        good then.
        """
        if not math.isfinite(float(logits.max())):
            raise CacheUseError(
                "the model's output is not finite: its weights or its number type are at fault; "
                "try --dtype float32"
            )
        if self._random is None:
            return int(logits.argmax())
        scores: torch.Tensor = self._processors(None, logits.float()[None])
        return int(scores.softmax(-1).multinomial(1, generator=self._random))


# --- Text from tokens ---

_REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes a growing list of tokens piece by piece.

    A character may be spread over several tokens and a token's text may depend on the one before
    it, so each piece is the difference of two decodings that start at the same token, and is held
    back while it ends in an incomplete character. `tokenizer` is one of transformers; `before` are
    tokens of a text that goes on, whose own text never comes.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._start = 0
        self._shown = len(self._ids)
        if self._text(0, self._shown).endswith(_REPLACEMENT):
            # It ends within a character, whose rest has no text behind it.
            self._start = self._shown

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
                self._ids[begin:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
