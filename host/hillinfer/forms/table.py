# SPDX-License-Identifier: Apache-2.0
"""The table of forms, by the names that users give them."""

from __future__ import annotations

import re

from hillinfer.errors import SettingsError
from hillinfer.forms.dropped import DROPPERS, DroppedForm
from hillinfer.forms.form import Form
from hillinfer.forms.quantised import MixedForm, QuantisedForm
from hillinfer.forms.whole import HeldForm, TextForm

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
