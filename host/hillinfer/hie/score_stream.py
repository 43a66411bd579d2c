# SPDX-License-Identifier: Apache-2.0
"""From L' of all tokens to a stream of score blocks (scoring contract, sections 3, 4 and 6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hillinfer.hie.offsets import sequence_offsets
from hillinfer.hie.scratch import final_tokens
from hillinfer.hie.token_tuples import TokenTuples
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.score_block import ScoreBlock
from hillinfer_model.score_tuples import WINDOW_TOKENS


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
    coming
        As for `sequence_offsets`.
    """

    def __init__(
        self,
        spec: KernelSpec,
        scope: Scope,
        log_weights: torch.Tensor,
        invalid: torch.Tensor,
        coming: int = 0,
    ) -> None:
        self._spec = spec
        self._tokens = log_weights.shape[-1]
        self._log_weights = log_weights
        self._invalid = invalid
        offsets = sequence_offsets(spec, scope, log_weights, invalid, coming)
        self._tuples = TokenTuples(spec, scope, offsets)

    def __iter__(self) -> Iterator[ScoreBlock]:
        """Yield blocks of `block_tokens` tuples; a block ends where its 65,536-window ends."""
        tuples = np.empty((self._tuples.sets, self._tokens), dtype=np.uint32)
        length = self._spec.block_tokens
        step = final_tokens(self._spec, tuples.shape[0])
        filled = 0
        for window in range(0, self._tokens, WINDOW_TOKENS):
            window_stop = min(window + WINDOW_TOKENS, self._tokens)
            for start in range(window, window_stop, length):
                stop = min(start + length, window_stop)
                while filled < stop:
                    next_filled = min(filled + step, self._tokens)
                    tuples[:, filled:next_filled] = self._tuples.of(
                        self._log_weights[..., filled:next_filled],
                        self._invalid[:, filled:next_filled],
                        filled,
                    )
                    filled = next_filled
                for row in range(tuples.shape[0]):
                    yield ScoreBlock(row, window, tuples[row, start:stop])
