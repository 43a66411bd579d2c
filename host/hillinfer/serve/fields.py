# SPDX-License-Identifier: Apache-2.0
"""The fields of a request's JSON object, each with its type and range."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hillinfer.serve.refusals import ApiError, invalid

_MOST_SHOWN = 60


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises
    ------
    ApiError
        Where it is none.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the body is not JSON: {reason[:200]}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise invalid(f"the body is {_kind(given)} and must be an object", code="invalid_json")
    return given


class Fields:
    """Fields of an object, read by name; `null` is as none, and what nobody reads is `unknown`.

    Parameters
    ----------
    given
        The object.
    place
        What it is called before its fields' names in errors.
    """

    def __init__(self, given: Mapping[str, Any], place: str = "") -> None:
        self._given, self._place = given, place
        self._read: set[str] = set()

    @property
    def unknown(self) -> list[str]:
        """Names of fields that nobody asked for."""
        return sorted(str(name) for name in self._given.keys() - self._read)

    def name(self, field: str) -> str:
        """Return what a field is called in errors."""
        return f"{self._place}{field}"

    def take(self, field: str) -> Any:
        """Return what a field has, None where it is not there."""
        self._read.add(field)
        return self._given.get(field)

    def number(self, field: str, default: float, low: float, high: float) -> float:
        """Return a number within a range, bounds included."""
        given = self.take(field)
        if given is None:
            return default
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise self.wrong(field, given, "a number")
        if not low <= given <= high:
            raise self.wrong(field, given, f"between {_short(low)} and {_short(high)}")
        return float(given)

    def whole(self, field: str, default: int | None, low: int, high: int) -> int | None:
        """Return a whole number within a range, bounds included."""
        given = self.take(field)
        if given is None:
            return default
        if isinstance(given, float) and given.is_integer():
            given = int(given)
        if isinstance(given, bool) or not isinstance(given, int):
            raise self.wrong(field, given, "a whole number")
        if not low <= given <= high:
            raise self.wrong(field, given, f"between {low} and {high}")
        return given

    def flag(self, field: str) -> bool:
        """Return true or false; false where it is not there."""
        given = self.take(field)
        if given is None:
            return False
        if not isinstance(given, bool):
            raise self.wrong(field, given, "true or false")
        return given

    def text(self, field: str) -> str | None:
        """Return a text."""
        given = self.take(field)
        if given is None:
            return None
        if not isinstance(given, str):
            raise self.wrong(field, given, "a string")
        return checked_text(given, self.name(field))

    def inner(self, field: str) -> Fields:
        """Return the fields of an object; of an empty one where it is not there."""
        given = self.take(field)
        if given is None:
            return Fields({}, f"{self.name(field)}.")
        if not isinstance(given, dict):
            raise self.wrong(field, given, "an object")
        return Fields(given, f"{self.name(field)}.")

    def only(self, field: str, allowed: Sequence[Any]) -> None:
        """Refuse a field that says what this server does not do."""
        given = self.take(field)
        if given is None or any(given == one and type(given) is type(one) for one in allowed):
            return
        raise ApiError(
            400,
            f"{self.name(field)}={_shown(given)} is not supported: leave it out",
            "unsupported_value",
            param=self.name(field),
        )

    def wrong(self, field: str, given: object, wanted: str) -> ApiError:
        """Return the refusal of a field's value."""
        name = self.name(field)
        return invalid(f"{name} is {_shown(given)} and must be {wanted}", name)


def checked_text(given: str, name: str) -> str:
    """Return a text, none with half characters.

    Raises
    ------
    ApiError
        Where it has any, which tokenizers cannot take.
    """
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{name} has half a character at {error.start}", name) from error
    return given


def _shown(given: object) -> str:
    if isinstance(given, dict | list):
        return _kind(given)
    told = repr(given) if isinstance(given, str) else str(given)
    # No text of a request is told at length, in errors or in logs.
    return told if len(told) <= _MOST_SHOWN else f"{told[:_MOST_SHOWN]}…"


def _kind(given: object) -> str:
    if isinstance(given, dict):
        return "an object"
    if isinstance(given, list):
        return "a list"
    return "a string" if isinstance(given, str) else str(given)[:20]


def _short(bound: float) -> str:
    return f"{bound:g}" if math.isfinite(bound) else "any"
