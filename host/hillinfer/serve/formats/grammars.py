# SPDX-License-Identifier: Apache-2.0
"""Which tokens may come next in an answer of a form that was asked for, by llguidance."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from hillinfer.serve.formats.asked_format import AskedFormat
from hillinfer.serve.refusals import ApiError, invalid

_MOST_SHOWN = 200


class Grammars:
    """Makes grammars' states for one model; any thread may use it.

    Parameters
    ----------
    tokenizer
        One of transformers.
    words
        How many tokens the model has logits for.
    stop_ids
        Tokens that end an answer; maybe none.
    """

    def __init__(self, tokenizer: Any, words: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._words, self._stop_ids = tokenizer, words, stop_ids
        self._lock = threading.Lock()
        self._known: Any = None

    def begin(self, asked: AskedFormat) -> GrammarState:
        """Return the state before an answer's first token; takes up to a second.

        Raises
        ------
        ApiError
            Where the grammar is none, asks for what llguidance does not know, or is too large, or
            the tokenizer is of a kind that it cannot use.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ApiError(
                400,
                f"{asked.param} is not supported by this server: it lacks llguidance, of the extra "
                "serve",
                "unsupported_value",
                param=asked.param,
            ) from error
        matcher = LLMatcher(self._own_tokenizer(asked.param), asked.grammar, log_level=0)
        if matcher.is_error():
            # The first line alone: others repeat the schema.
            reason = matcher.get_error().splitlines()[0][:_MOST_SHOWN]
            raise invalid(f"{asked.param} cannot be used: {reason}", asked.param)
        return GrammarState(matcher, self._words, asked.param)

    def _own_tokenizer(self, param: str) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._known is None:
                # Of a model whose answers do not end by themselves one token more, which has no
                # logit, stands for the end.
                ends = sorted(self._stop_ids) or [self._words]
                try:
                    self._known = from_tokenizer(
                        self._tokenizer, max(self._words, *ends, 0) + 1, eos_token=ends
                    )
                except ValueError as error:
                    raise ApiError(
                        400,
                        f"{param} is not supported with this model: its tokenizer is of a kind "
                        "that grammars cannot use",
                        "unsupported_value",
                        param=param,
                    ) from error
            return self._known


class GrammarState:
    """How far an answer has come.

    Parameters
    ----------
    matcher
        One of llguidance.
    words
        How many tokens the model has logits for.
    param
        The field that asked for the form.
    """

    def __init__(self, matcher: Any, words: int, param: str) -> None:
        self._matcher, self._words, self._param = matcher, words, param
        self._bits = np.zeros((words + 1 + 31) // 32, np.int32)

    def fork(self) -> GrammarState:
        """Return a state that goes on from here by itself."""
        return GrammarState(self._matcher.deep_copy(), self._words, self._param)

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (vocabulary,), in float32; those of other tokens are -inf.

        Raises
        ------
        ApiError
            Where the grammar became too large, or no token goes on.
        """
        # A word of the mask for each 32 tokens, its last one with what the model has no logits for.
        size = self._bits.size * self._bits.itemsize
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, size)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._words]
        allowed = torch.from_numpy(bits.astype(bool)).to(logits.device)
        if not bits.any():
            raise invalid(f"{self._param}: no token of this model goes on with it", self._param)
        changed = logits.float().clone()
        changed[: self._words][~allowed] = float("-inf")
        return changed

    def take(self, token_id: int) -> None:
        """Go on by a token; ApiError as of `masked`."""
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_over(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0][:_MOST_SHOWN]
            raise invalid(f"{self._param} cannot be used: {reason}", self._param)
