# SPDX-License-Identifier: Apache-2.0
"""What a store counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StoreCounts:
    """What a store did for this process since it was opened.

    Parameters
    ----------
    lookups, hit_tokens, miss_tokens
        Prompts looked up, and how many of their tokens were found.
    evicted_chunks, quarantined_chunks
        Chunks that gave way, and those whose bytes were wrong.
    failures
        What went wrong and became a miss.
    saved_seconds
        What computing the rows that were found took when they were stored.
    last_failure
        What went wrong last.
    """

    lookups: int = 0
    hit_tokens: int = 0
    miss_tokens: int = 0
    evicted_chunks: int = 0
    quarantined_chunks: int = 0
    failures: int = 0
    saved_seconds: float = 0.0
    last_failure: str = ""
