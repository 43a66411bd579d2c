# SPDX-License-Identifier: Apache-2.0
"""Records of a catalogue: a document, what its forms keep, measured or expected, and its uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hillinfer.errors import HillInferError, SettingsError
from hillinfer.forms.intervals import expected_end
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


# --- What quality forms keep, by other documents' probes ---

# A short document allows few probes in half of what reading it takes, so the lower ends of its
# intervals are low, and some of its forms are not measured at all. Codes lose about as much of one
# document as of another of the same model. So the others say what to expect of one more, unless its
# own probes say worse. Of what is dropped that is not so: it hangs on the text.

# Of a short document, tokens of an answer that are compared: the first ones, which still say more
# than nine tenths where all of them agree.
SHORT_ANSWER = 28
# Fewer others say nothing, and of more the newest say enough.
_LEAST_OTHERS, _MOST_OTHERS = 3, 32


@dataclass(frozen=True)
class MeasuredText:
    """A document as what was measured of its forms.

    Parameters
    ----------
    tokens
        That it has.
    forms
        Measured of it.
    token_seconds
        Of a decode step behind all its rows.
    """

    tokens: int
    forms: tuple[MeasuredForm, ...]
    token_seconds: float


def expected_forms(own: MeasuredText, others: Sequence[MeasuredText]) -> tuple[MeasuredForm, ...]:
    """Return a document's forms with what others let expect of them, and those of others alone.

    The lower end of a form's quality becomes that of what one more document keeps, by a 90 %
    interval of the others' means. It is raised to that, never above what its own probes say. A form
    that was not measured of it has that end as its quality, and takes bytes and seconds as those of
    others do for each token.

    Parameters
    ----------
    own
        The document.
    others
        Of the same model.
    """
    measured = {one.form: one for one in own.forms}
    found = []
    for name in dict.fromkeys([*measured, *(one.form for each in others for one in each.forms)]):
        known = [
            (each, one)
            for each in others
            for one in each.forms
            if one.form == name and not one.is_expected
        ]
        mine = measured.get(name)
        if len(known) < _LEAST_OTHERS or not _is_alike(name):
            found += [] if mine is None else [mine]
            continue
        agreements = [one.agreement for _, one in known]
        lower = expected_end(agreements, SHORT_ANSWER * len(known))
        if mine is not None:
            found.append(replace(mine, lower=max(mine.lower, min(lower, mine.agreement))))
            continue
        opening = fmean(one.opening_seconds / each.tokens for each, one in known) * own.tokens
        size = max(-(-one.byte_count * own.tokens // each.tokens) for each, one in known)
        divergence = fmean(one.divergence for _, one in known)
        found.append(
            MeasuredForm(
                name, size, lower, min(one.worst for _, one in known), lower, divergence, opening,
                own.token_seconds, is_expected=True,
            )
        )  # fmt: skip
    return tuple(found)


def with_expected_forms(documents: Iterable[KnownDocument]) -> list[KnownDocument]:
    """Return documents of a catalogue with the forms that may be expected of each.

    Those that were not measured stay as they are, and say nothing of others.
    """
    every = list(documents)
    measured: dict[bytes, list[KnownDocument]] = {}
    for one in sorted(every, key=lambda one: one.put_at, reverse=True):
        if one.resting is not None:
            measured.setdefault(one.namespace, []).append(one)
    found = []
    for document in every:
        if document.resting is None:
            found.append(document)
            continue
        known = measured[document.namespace][: _MOST_OTHERS + 1]
        others = [_text(one) for one in known if one.key != document.key]
        forms = expected_forms(_text(document), others[:_MOST_OTHERS])
        in_order = sorted(forms, key=lambda one: (one.byte_count, one.form))
        found.append(replace(document, measured=tuple(in_order)))
    return found


def _text(document: KnownDocument) -> MeasuredText:
    assert document.resting is not None
    return MeasuredText(document.tokens, document.measured, document.resting.token)


def _is_alike(name: str) -> bool:
    try:
        # Forms need torch, and a catalogue is listed without.
        from hillinfer.forms.table import make_form

        return make_form(name).is_alike
    except (SettingsError, ImportError):
        # Or it is of another version, which has forms that this one has not.
        return False
