# SPDX-License-Identifier: Apache-2.0
"""What a store counts, and the snapshot of it under the names that a server gives out."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace


@dataclass(frozen=True)
class StoreCounts:
    """What a store did for this process since it was opened.

    Parameters
    ----------
    lookups, hit_tokens, miss_tokens
        Prompts looked up, and how many of their tokens were found.
    restored_bytes, stored_bytes, stored_tokens
        Rows that were read back, and rows and tokens that can be found since.
    evicted_chunks, quarantined_chunks, refused_chunks
        Chunks that gave way, those whose bytes were wrong, and those that were not stored because
        they were not admitted or too much was written that day.
    failures
        What went wrong and became a miss.
    saved_seconds
        What computing the rows that were found took when they were stored.
    bubble_seconds
        What passes waited for rows that stream.
    last_failure
        What went wrong last.
    """

    lookups: int = 0
    hit_tokens: int = 0
    miss_tokens: int = 0
    restored_bytes: int = 0
    stored_bytes: int = 0
    stored_tokens: int = 0
    evicted_chunks: int = 0
    quarantined_chunks: int = 0
    refused_chunks: int = 0
    failures: int = 0
    saved_seconds: float = 0.0
    bubble_seconds: float = 0.0
    last_failure: str = ""


class StoreMeter:
    """Counts what a store does; any thread may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = StoreCounts()

    @property
    def counts(self) -> StoreCounts:
        """What was counted so far."""
        return self._counts

    def add(self, **amounts: float) -> None:
        """Add to counts, by the names of `StoreCounts`."""
        with self._lock:
            now = {name: getattr(self._counts, name) + amount for name, amount in amounts.items()}
            self._counts = replace(self._counts, **now)

    def note_failure(self, error: Exception) -> None:
        """Count what became a miss, and keep what it says."""
        with self._lock:
            self._counts = replace(
                self._counts, failures=self._counts.failures + 1, last_failure=str(error)
            )


# --- The snapshot ---

METRIC_PREFIX = "hillinfer_store_"
# Counted by this process; the other names are of what all processes have stored.
COUNTED = tuple(
    field.name.removesuffix("_chunks") if field.name == "quarantined_chunks" else field.name
    for field in fields(StoreCounts)
    if field.name != "last_failure"
)


def store_metrics(counts: StoreCounts, holds: Mapping[str, float]) -> dict[str, float]:
    """Return counts and what a store holds as a server gives them out, by their full names.

    Parameters
    ----------
    counts
        Of this process; each only grows.
    holds
        What the store holds now, as `Store.statistics` names it.
    """
    numbers = asdict(counts)
    del numbers["last_failure"]
    counted = dict(zip(COUNTED, numbers.values(), strict=True))
    return {f"{METRIC_PREFIX}{name}": value for name, value in {**holds, **counted}.items()}
