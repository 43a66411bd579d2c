# SPDX-License-Identifier: Apache-2.0
"""Forms by the names that users give them."""

from __future__ import annotations

import re

from hillinfer.errors import SettingsError
from hillinfer.forms.dropped import DROPPERS, DroppedForm
from hillinfer.forms.form import Form
from hillinfer.forms.whole import HeldForm, QuantisedForm, TextForm

RATIOS = (0.9, 0.75, 0.5, 0.35, 0.2)
"""Shares kept that are tried where nobody names others."""


def make_form(name: str) -> Form:
    """Return the form of a name.

    Parameters
    ----------
    name
        `text`, `held`, `int8`, `int4`, `int2`, or a dropper and the share it keeps, `snapkv-0.5`.

    Raises
    ------
    SettingsError
        Where there is no such form, naming those there are.
    """
    if name == "text":
        return TextForm()
    if name == "held":
        return HeldForm()
    bits = re.fullmatch(r"int(\d+)", name)
    if bits:
        return QuantisedForm(int(bits[1]))
    dropper, _, kept = name.partition("-")
    if dropper in DROPPERS and re.fullmatch(r"\d*\.?\d+", kept):
        return DroppedForm(dropper, float(kept))
    known = ["text", "held", "int8", "int4", "int2", *(f"{one}-0.5" for one in DROPPERS)]
    raise SettingsError(f"form={name!r} is unknown: choose one of {', '.join(known)}")


def usual_forms() -> list[Form]:
    """Return text, all rows, codes, and every dropper at every usual ratio."""
    whole = [make_form(name) for name in ("text", "held", "int8", "int4", "int2")]
    dropped = [DroppedForm(dropper, kept) for dropper in DROPPERS for kept in RATIOS]
    return [*whole, *dropped]
