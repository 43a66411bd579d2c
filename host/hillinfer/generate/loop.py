# SPDX-License-Identifier: Apache-2.0
"""Forward calls over one cache: read a prompt in chunks, then choose token by token."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hillinfer.errors import CacheUseError, SettingsError
from hillinfer.statistics import CacheStatistics

if TYPE_CHECKING:
    import torch

# --- The next token ---


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0, else drawn from what top-k and top-p leave.

    Raises SettingsError where a value is outside its range.

    Parameters
    ----------
    temperature
        Divides the logits; 0 takes the most likely token.
    top_k
        Number of most likely tokens that stay; 0 for all.
    top_p
        Smallest probability mass that stays, above 0, at most 1.
    seed
        Of the random numbers; the same seed draws the same tokens from the same logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if not 0 <= self.temperature < float("inf"):
            raise SettingsError(f"temperature={self.temperature} must be 0 (greedy) or above")
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
    """Draws tokens one after the other, with random numbers of its own.

    `device` is where the logits lie.
    """

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
    back while it ends in an incomplete character. `tokenizer` is one of transformers.
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
                self._ids[begin:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


# --- The loop ---


class Generation:
    """One sequence that grows in a cache, HillInfer's or transformers' own.

    The same tokens as `model.generate` with `prefill_chunk_size`, but every step is the caller's:
    for progress, for text as it comes, for stopping anywhere, and for several questions about one
    document. The model is one of transformers, attached where the cache is HillInfer's; `cache` is
    what to pass as `past_key_values`, and `chunk_tokens` the tokens of one forward call while a
    prompt is read.
    """

    def __init__(self, model: Any, cache: Any, chunk_tokens: int = 1024) -> None:
        if chunk_tokens < 1:
            raise SettingsError(f"prefill_chunk={chunk_tokens} must be at least 1")
        self.cache = cache
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._logits: torch.Tensor | None = None

    def read(
        self, token_ids: Sequence[int], on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read tokens in chunks; every token of a chunk attends to everything before it.

        `on_progress` is called after each chunk with the number of tokens read so far.
        """
        for start in range(0, len(token_ids), self._chunk_tokens):
            chunk = token_ids[start : start + self._chunk_tokens]
            self._forward(chunk)
            on_progress(start + len(chunk))

    def read_singly(
        self, token_ids: Sequence[int], on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read tokens one by one as in decode, each with a selected set of its own.

        Parameters as in `read`.
        """
        for done, token_id in enumerate(token_ids, start=1):
            self._forward([token_id])
            on_progress(done)

    def decode(
        self, sampling: Sampling, max_new_tokens: int, stop_ids: frozenset[int]
    ) -> Iterator[int]:
        """Yield new tokens until one of `stop_ids` (yielded too) or `max_new_tokens`.

        A token enters the cache when the next one is asked for, so afterwards the cache holds
        everything but the last, as after `model.generate`.

        Raises CacheUseError where nothing was read before.
        """
        if self._logits is None:
            raise CacheUseError("nothing was read yet: call read() with the prompt first")
        chooser = TokenChooser(sampling, self._logits.device)
        for count in range(1, max_new_tokens + 1):
            token_id = chooser.choose(self._logits)
            yield token_id
            if token_id in stop_ids or count == max_new_tokens:
                return
            self._forward([token_id])

    def fork(self) -> Generation:
        """Return a generation that goes on from here by itself.

        A HillInfer cache shares its rows with the fork; an ordinary one is copied.
        """
        own = getattr(self.cache, "fork", None)
        twin = Generation(
            self._model, own() if own else copy.deepcopy(self.cache), self._chunk_tokens
        )
        twin._logits = self._logits
        return twin

    def statistics(self) -> CacheStatistics | None:
        """Return what the cache counted so far; None for a cache that does not count."""
        count: Callable[[], CacheStatistics] | None = getattr(self.cache, "statistics", None)
        return count() if count else None

    def close(self) -> None:
        """Close the cache where it can be closed."""
        close = getattr(self.cache, "close", None)
        if close:
            close()

    def _forward(self, token_ids: Sequence[int]) -> None:
        # Not above: the command reads its options without torch.
        import torch

        ids = torch.tensor([list(token_ids)], device=self._model.device)
        with torch.no_grad():
            output = self._model(
                input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            )
        self._logits = output.logits[0, -1]
