# SPDX-License-Identifier: Apache-2.0
"""Forms by the names that users give them, and what placement may choose of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hillinfer.errors import SettingsError
from hillinfer.forms.dropped import DROPPERS, DroppedForm
from hillinfer.forms.form import Form, FormRates
from hillinfer.forms.probes import FormQuality
from hillinfer.forms.quantised import MixedForm, QuantisedForm
from hillinfer.forms.whole import HeldForm, TextForm, states_bytes
from hillinfer.model_shape import ModelShape
from hillinfer.placement.options import Option, Tier

# --- Names ---

CODES = ("int8", "mixed5", "mixed4", "int4", "int2")
"""Codes that are tried where nobody names others."""
RATIOS = (0.9, 0.75, 0.5, 0.35, 0.2)
"""Shares kept that are tried where nobody names others."""


def make_form(name: str) -> Form:
    """Return the form of a name.

    Parameters
    ----------
    name
        `text`, `held`, codes like `int4`, `k5v4` where keys have more bits than values, or `mixed4`
        where some channels have, or a dropper and the share it keeps, like `snapkv-0.5`.

    Raises
    ------
    SettingsError
        Where there is no such form, naming those there are.
    """
    if name == "text":
        return TextForm()
    if name == "held":
        return HeldForm()
    bits = re.fullmatch(r"int(\d)|k(\d)v(\d)", name)
    if bits:
        return QuantisedForm(int(bits[1] or bits[2]), int(bits[1] or bits[3]))
    mixed = re.fullmatch(r"mixed(\d)", name)
    if mixed:
        return MixedForm(int(mixed[1]))
    dropper, _, kept = name.partition("-")
    if dropper in DROPPERS and re.fullmatch(r"\d*\.?\d+", kept):
        return DroppedForm(dropper, float(kept))
    known = ["text", "held", *CODES, *(f"{one}-0.5" for one in DROPPERS)]
    raise SettingsError(f"form={name!r} is unknown: choose one of {', '.join(known)}")


def usual_forms() -> list[Form]:
    """Return text, all rows, codes, and every dropper at every usual ratio."""
    whole = [make_form(name) for name in ("text", "held", *CODES)]
    dropped = [DroppedForm(dropper, kept) for dropper in DROPPERS for kept in RATIOS]
    return [*whole, *dropped]


# --- Options of a document ---

ROWS = "rows"
"""The stored rows, which are always kept: name of the option that reads them whole."""


def document_options(
    forms: Sequence[Form],
    qualities: Mapping[str, FormQuality],
    rates: Mapping[str, FormRates],
    tiers: Sequence[Tier],
    shape: ModelShape,
    tokens: int,
) -> list[Option]:
    """Return a document's options: forms on every tier with a budget, and how it rests.

    It rests as its text, or as its stored rows, whichever is worth more; neither takes anything of
    a budget. Utility counts the lower end of a form's quality.

    Parameters
    ----------
    forms
        But for text.
    qualities
        Of each form, by its name; one that drops nothing may be left out.
    rates
        Of each tier, by its name. Those of the last one are of reading stored rows, and of prefill.
    tiers
        Fastest first; the last one without a budget.
    shape
        Of the model.
    tokens
        Of the document.

    Raises
    ------
    SettingsError
        Where a form was not measured, or a tier has no rates.
    """
    missing = [tier.name for tier in tiers if tier.name not in rates]
    if missing:
        raise SettingsError(f"no rates of tier {', '.join(missing)}: measure them first")
    *limited, rest = tiers
    read = rates[rest.name]
    text = TextForm().option(rest.name, 1.0, read, shape, tokens)
    options = [
        # Both lie there anyway.
        Option(text.form, rest.name, 0, 1.0, text.first_token, text.token_seconds),
        Option(
            ROWS,
            rest.name,
            0,
            1.0,
            states_bytes(shape, tokens) / read.tier_bytes,
            read.token_seconds,
        ),
    ]
    for form in forms:
        quality = _quality(form, qualities)
        for tier in limited:
            options.append(form.option(tier.name, quality, rates[tier.name], shape, tokens))
    return options


def _quality(form: Form, qualities: Mapping[str, FormQuality]) -> float:
    if form.drops_nothing:
        return 1.0
    if form.name not in qualities:
        raise SettingsError(f"form {form.name} was not measured for this document: probe it first")
    return qualities[form.name].lower
