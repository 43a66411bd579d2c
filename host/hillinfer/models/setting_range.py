# SPDX-License-Identifier: Apache-2.0
"""Numbers of a config that lie within bounds, and the line that says where one does not."""

from __future__ import annotations

from typing import Any

from hillinfer.models.errors import ModelError

_MOST_LETTERS = 60


def wrong_setting(name: str, value: Any, where: object, reason: str) -> ModelError:
    """Return the error of a setting; its value is written only now, since it may be long."""
    return ModelError(f"{where} has {name}={repr(value)[:_MOST_LETTERS]} in its config{reason}")


def check_whole(name: str, value: Any, low: int, high: int, where: object) -> None:
    """Refuse what is no whole number from `low` to `high`.

    Raises
    ------
    ModelError
        Then.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong_setting(name, value, where, f": it is {low} to {high}")


def check_number(name: str, value: Any, low: float, high: float, where: object) -> None:
    """Refuse what is no number from `low` to `high`.

    Raises
    ------
    ModelError
        Then.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise wrong_setting(name, value, where, f": it is {low:g} to {high:g}")
