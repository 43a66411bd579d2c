# SPDX-License-Identifier: Apache-2.0
"""Which sequences one forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer.storage.sequence import Sequence


@dataclass(frozen=True)
class SequenceShare:
    """One distinct sequence of a batch.

    Parameters
    ----------
    sequence
        Where its rows go.
    batch_rows
        Rows of the batch that hold it; more than one where prompts or beams are identical.
    tokens
        Real tokens this forward brings, the last ones of the batch row; padding comes before.
    """

    sequence: Sequence
    batch_rows: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class ForwardPlan:
    """One forward pass.

    Parameters
    ----------
    start
        Index of its first token, padding included.
    tokens
        Tokens of each batch row, padding included.
    batch
        Rows of the batch.
    shares
        The distinct sequences.
    """

    start: int
    tokens: int
    batch: int
    shares: tuple[SequenceShare, ...]
