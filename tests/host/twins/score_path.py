# SPDX-License-Identifier: Apache-2.0
"""From L' to tuples, in torch (scoring contract, sections 7 and 11)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.score_tuples import WINDOW_TOKENS
from twins.log_weights import USUAL, Pieces
from twins.query_path import sequence_offsets
from twins.score_codes import raw_sum_codes, weight_sum_codes, weights_in_place


class TokenTuples:
    """Makes tuples of any tokens of a sequence whose offsets are known.

    Parameters
    ----------
    spec, scope
        Rule and shape; what shares one selected set.
    offsets
        From `sequence_offsets`.

    Attributes
    ----------
    sets
        Selected sets: 1, or one per KV head.
    """

    def __init__(self, spec: KernelSpec, scope: Scope, offsets: torch.Tensor) -> None:
        self._rule = spec.rule
        self._scope = scope
        self.sets = 1 if scope is Scope.LAYER else spec.kv_heads
        self._offsets = offsets.view(self.sets, -1, 1)

    def of(
        self, log_weights: torch.Tensor, invalid: torch.Tensor, first_position: int
    ) -> NDArray[np.uint32]:
        """Return the tuples of consecutive tokens.

        Parameters
        ----------
        log_weights
            L' of these tokens, int32 of shape (kv_heads, heads, tokens).
        invalid
            bool of shape (kv_heads, tokens).
        first_position
            Position of the first of them.

        Returns
        -------
        uint32 of shape (sets, tokens).
        """
        if self._scope is Scope.LAYER:
            log_weights = log_weights.flatten(0, 1).unsqueeze(0)
            invalid = invalid.any(0, keepdim=True)
        if self._rule is Rule.RAW_SUM:
            sums = log_weights.sum(1, dtype=torch.int32)
            codes = raw_sum_codes(sums.sub_(self._offsets[:, 0]))
        else:
            weights = weights_in_place(log_weights - self._offsets)
            codes = weight_sum_codes(weights.sum(1, dtype=torch.float64))
        codes.masked_fill_(invalid, 0)
        codes.bitwise_left_shift_(16)
        positions = torch.arange(first_position, first_position + codes.shape[-1])
        codes += positions.bitwise_and_(WINDOW_TOKENS - 1)
        return codes.numpy().astype(np.uint32)


def sequence_tuples(
    spec: KernelSpec,
    scope: Scope,
    log_weights: torch.Tensor,
    invalid: torch.Tensor,
    coming: int = 0,
    pieces: Pieces = USUAL,
) -> NDArray[np.uint32]:
    """Return the tuples of a whole sequence, uint32 (sets, N), made piece by piece.

    Parameters
    ----------
    spec, scope
        Rule and shape; what shares one selected set.
    log_weights
        L' of all N tokens, int32 of shape (kv_heads, heads, N).
    invalid
        bool of shape (kv_heads, N).
    coming
        As for `sequence_offsets`.
    pieces
        How much is done at once.
    """
    own = TokenTuples(spec, scope, sequence_offsets(spec, scope, log_weights, invalid, coming))
    tuples = np.empty((own.sets, log_weights.shape[-1]), dtype=np.uint32)
    step = pieces.final_tokens(spec, own.sets)
    for first in range(0, tuples.shape[1], step):
        part = slice(first, first + step)
        tuples[:, part] = own.of(log_weights[..., part], invalid[:, part], first)
    return tuples
