# SPDX-License-Identifier: Apache-2.0
"""How much of a saved document another one can start with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def reusable_tokens(
    saved_ids: Sequence[int],
    ids: Sequence[int],
    chunk_tokens: int,
    segment_tokens: int,
    unread_tokens: int = 0,
) -> int:
    """Return how many of a session's first tokens a document is read on from.

    All where the documents are equal, else those of whole segments in common, down to the border of
    a chunk: the rest is then read in the same chunks as without a session, and every bit is equal.

    Parameters
    ----------
    saved_ids, ids
        Of the saved document and of the new one.
    chunk_tokens
        Tokens of one forward pass of reading.
    segment_tokens
        Tokens that share channel statistics.
    unread_tokens
        Tokens at the end that must be read in any case.
    """
    if not unread_tokens and list(saved_ids) == list(ids):
        return len(ids)
    pairs = zip(saved_ids, ids[: len(ids) - unread_tokens], strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    whole = common // segment_tokens * segment_tokens
    return whole // chunk_tokens * chunk_tokens
