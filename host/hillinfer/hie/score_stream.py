# SPDX-License-Identifier: Apache-2.0
"""From L' of all tokens to a stream of score blocks (scoring contract, sections 3, 4 and 6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hillinfer.hie.offsets import offset_tokens, raw_sum_offsets, weight_sum_offsets
from hillinfer.hie.score_codes import raw_sum_codes, weight_sum_codes, weights_in_place
from hillinfer.hie.scratch import final_tokens
from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.score_block import ScoreBlock

_WINDOW = 1 << 16


class ScoreStream:
    """The score blocks of one call, in position order, made as they are asked for.

    Parameters
    ----------
    spec
        Rule, shape and block length.
    scope
        What shares one selected set.
    log_weights
        L' of all N tokens, int32 of shape (kv_heads, heads, N).
    invalid
        bool of shape (kv_heads, N).
    """

    def __init__(
        self,
        spec: KernelSpec,
        scope: Scope,
        log_weights: torch.Tensor,
        invalid: torch.Tensor,
    ) -> None:
        self._spec = spec
        self._tokens = log_weights.shape[-1]
        if scope is Scope.LAYER:
            # One selected set: its heads are all heads, and one invalid KV head spoils a token.
            self._log_weights = log_weights.flatten(0, 1).unsqueeze(0)
            self._invalid = invalid.any(0, keepdim=True)
        else:
            self._log_weights = log_weights
            self._invalid = invalid
        self._offsets = self._make_offsets(log_weights, invalid)

    def __iter__(self) -> Iterator[ScoreBlock]:
        """Yield blocks of `block_tokens` tuples; a block ends where its 65,536-window ends."""
        tuples = np.empty((self._invalid.shape[0], self._tokens), dtype=np.uint32)
        length = self._spec.block_tokens
        step = final_tokens(self._spec, tuples.shape[0])
        filled = 0
        for window in range(0, self._tokens, _WINDOW):
            window_stop = min(window + _WINDOW, self._tokens)
            for start in range(window, window_stop, length):
                stop = min(start + length, window_stop)
                while filled < stop:
                    next_filled = min(filled + step, self._tokens)
                    tuples[:, filled:next_filled] = self._tuples(filled, next_filled)
                    filled = next_filled
                for row in range(tuples.shape[0]):
                    yield ScoreBlock(row, window, tuples[row, start:stop])

    def _make_offsets(self, log_weights: torch.Tensor, invalid: torch.Tensor) -> torch.Tensor:
        """Return B of each head or A of each selected set, int32 (sets, heads or 1, 1)."""
        sample = offset_tokens(self._log_weights)
        if self._spec.rule is Rule.RAW_SUM:
            sums = sample.sum(1, dtype=torch.int32)
            return raw_sum_offsets(sums, offset_tokens(self._invalid)).view(-1, 1)
        offsets = weight_sum_offsets(
            sample.view(*log_weights.shape[:2], -1), offset_tokens(invalid), self._tokens
        )
        return offsets.view(*self._log_weights.shape[:2], 1)

    def _tuples(self, start: int, stop: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
        values = self._log_weights[..., start:stop]
        if self._spec.rule is Rule.RAW_SUM:
            codes = raw_sum_codes(values.sum(1, dtype=torch.int32).sub_(self._offsets))
        else:
            weights = weights_in_place(values - self._offsets)
            codes = weight_sum_codes(weights.sum(1, dtype=torch.float64))
        codes.masked_fill_(self._invalid[:, start:stop], 0)
        codes.bitwise_left_shift_(16)
        codes += torch.arange(start, stop).bitwise_and_(_WINDOW - 1)
        return codes.numpy().astype(np.uint32)
