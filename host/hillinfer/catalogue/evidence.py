# SPDX-License-Identifier: Apache-2.0
"""Estimates what quality a document's forms keep, by its own probes and by other documents'.

A short document allows few probes in half of what reading it takes, so the lower ends of its
intervals are low, and some of its forms are not measured at all. Codes lose about as much of one
document as of another of the same model. So the others say what to expect of one more, unless its
own probes say worse. Of what is dropped that is not so: it hangs on the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hillinfer.catalogue.records import KnownDocument, MeasuredForm
from hillinfer.errors import SettingsError
from hillinfer.forms.intervals import expected_end

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
