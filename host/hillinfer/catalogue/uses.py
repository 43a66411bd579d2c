# SPDX-License-Identifier: Apache-2.0
"""How often documents are asked for, by what their store counts for all processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hillinfer.catalogue.records import CatalogueError, KnownDocument
from hillinfer.store.database import Database, State
from hillinfer.store.eviction import HITS_HALF_LIFE

# Variables of one query; SQLite takes many more.
_BATCH = 512


@dataclass(frozen=True)
class DocumentUse:
    """How often a stored document is asked for.

    Parameters
    ----------
    hits
        How often it was found, a hit counting for half after each hour.
    per_hour
        What that means: uses in an hour.
    last
        When it was last found, in seconds since 1970.
    token_bytes
        Bytes of a token's rows in all layers.
    """

    hits: float
    per_hour: float
    last: float
    token_bytes: int = 0


def document_uses(
    database: Database, keys: Sequence[bytes], now: float
) -> Mapping[bytes, DocumentUse]:
    """Return the uses of documents that a store still has, by their keys.

    Parameters
    ----------
    database
        Of the store's index.
    keys
        Of documents; one that is not among the answers is not stored any more.
    now
        The time, in seconds since 1970.
    """
    found: dict[bytes, DocumentUse] = {}
    for start in range(0, len(keys), _BATCH):
        part = keys[start : start + _BATCH]
        for key, hits, last, token_bytes in database.rows(
            "SELECT p.hash, c.hits, c.last, n.layers * n.row_bytes FROM prefix p "
            "JOIN chunk c ON c.id = p.chunk JOIN namespace n ON n.id = c.namespace "
            f"WHERE c.state = {State.READY:d} AND p.hash IN ({', '.join('?' * len(part))})",
            part,
        ):
            faded = hits * 0.5 ** (max(0.0, now - last) / HITS_HALF_LIFE)
            per_hour = faded * math.log(2) / HITS_HALF_LIFE * 3600
            use = DocumentUse(faded, per_hour, last, token_bytes)
            # A prefix may lie in two chunks for a moment.
            found[key] = max(found.get(key, use), use, key=lambda one: one.hits)
    return found


def check_stored(document: KnownDocument, uses: Mapping[bytes, DocumentUse]) -> None:
    """Raise CatalogueError where a store does not have a document's rows any more."""
    if document.key not in uses:
        raise CatalogueError(
            f"the rows of '{document.shown}' are gone from the store: hillinfer documents put "
            "reads it again, hillinfer documents rm forgets it"
        )
