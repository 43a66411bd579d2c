# SPDX-License-Identifier: Apache-2.0
"""What a store's user knows of a document beside its rows."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer.errors import HillInferError

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
