# SPDX-License-Identifier: Apache-2.0
"""Records of a catalogue: a document, what was measured of its forms, and its uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hillinfer.errors import HillInferError
from hillinfer.store.database import Database, State
from hillinfer.store.eviction import HITS_HALF_LIFE

NAME_DIGITS = 12
"""Of a document's key, where commands show its name; those of `hillinfer store ls` are as long."""

ROWS, TEXT = "rows", "text"
"""What a document rests as: its stored rows, or its token numbers, which are read again."""
RESTING = (ROWS, TEXT)


class CatalogueError(HillInferError):
    """A catalogue cannot be used, or has no such document."""


@dataclass(frozen=True)
class MeasuredForm:
    """What was measured of one form of one document, on this machine.

    Parameters
    ----------
    form
        Its name.
    byte_count
        What it takes.
    agreement, worst
        Of the probes that it is chosen by: the mean share of tokens that are those of all rows, and
        that of the worst probe.
    lower
        The lower end of a 90 % interval of the mean, which utility counts.
    divergence
        Mean KL divergence from all rows, in nats.
    opening_seconds, token_seconds
        Until a question can be read behind it, and of a decode step.
    judged
        Mean agreement of probes apart, which nothing is chosen by; None where there were none.
    is_expected
        Whether it was not measured of this document, and others say what to expect.
    """

    form: str
    byte_count: int
    agreement: float
    worst: float
    lower: float
    divergence: float
    opening_seconds: float
    token_seconds: float
    judged: float | None = None
    is_expected: bool = False


@dataclass(frozen=True)
class RestingTimes:
    """How long a document takes that rests, in seconds.

    Parameters
    ----------
    text
        Reading its tokens anew.
    rows
        Reading its stored rows.
    token
        A decode step behind all rows.
    """

    text: float
    rows: float
    token: float


@dataclass(frozen=True)
class KnownDocument:
    """A document of a catalogue.

    Parameters
    ----------
    key
        Of the stored prefix that it is, 32 bytes.
    title
        What its user calls it; empty in an encrypted store.
    model
        Name of the model that read it.
    namespace
        Digest of what its rows belong to: the model's weights, type and shape.
    tokens
        That are stored: whole groups of 64.
    put_at
        When it came, in seconds since 1970.
    resting
        How long it takes where it rests; None before it was measured.
    form
        What it shall lie as; `rows` and `text` are its rest.
    is_pinned
        Whether that was chosen by hand, and plans leave it.
    measured
        Its forms, fewest bytes first.
    """

    key: bytes
    title: str
    model: str
    namespace: bytes
    tokens: int
    put_at: float
    resting: RestingTimes | None = None
    form: str = ROWS
    is_pinned: bool = False
    measured: tuple[MeasuredForm, ...] = ()

    @property
    def name(self) -> str:
        """The first digits of its key."""
        return self.key.hex()[:NAME_DIGITS]

    @property
    def shown(self) -> str:
        """Its title where it has one, else its name."""
        return self.title or self.name

    def of_form(self, form: str) -> MeasuredForm | None:
        """Return what was measured of a form, None where it was not."""
        return next((one for one in self.measured if one.form == form), None)


# --- How often documents are asked for ---

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
