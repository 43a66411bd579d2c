# SPDX-License-Identifier: Apache-2.0
"""JSON files of models, read in bounded time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hillinfer.byte_size import format_bytes
from hillinfer.models.errors import ModelError

# Libraries copy what they read, a microsecond or a few for each value and each copy.
_MOST_VALUES = 1 << 20


def read_json_object(
    file: Path, most_bytes: int, most_values: int = _MOST_VALUES
) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Parameters
    ----------
    file
        An ordinary file.
    most_bytes
        A larger one is refused unread.
    most_values
        One with more values, lists and objects is refused before any of them is made.

    Raises
    ------
    ModelError
        Where it cannot be read, is too large, has too many values, is no UTF-8, no JSON or no
        object, is nested too deeply, names a key twice, or holds a number that is not finite.
    """
    check_size(file, most_bytes)
    try:
        text = file.read_text(encoding="utf-8")
        check_values(file, text, most_values)
        content = json.loads(
            text,
            object_pairs_hook=_once,
            parse_constant=_refused,
            parse_float=_finite,
        )
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except RecursionError as error:
        raise ModelError(f"cannot read {file}: it is nested too deeply") from error
    except ValueError as error:
        raise ModelError(f"cannot read {file}: it is not JSON in UTF-8 ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"cannot read {file}: it is not a JSON object of settings")
    return content


def check_size(file: Path, most_bytes: int) -> None:
    """Refuse what is no ordinary file or larger than it may be.

    Raises
    ------
    ModelError
        Then.
    """
    try:
        found = file.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    if not file.is_file():
        raise ModelError(f"cannot read {file}: it is not an ordinary file")
    if found > most_bytes:
        raise ModelError(
            f"{file} has {format_bytes(found)}, and such a file has {format_bytes(most_bytes)} at "
            "most: it is not what it should be, get the model anew"
        )


def check_values(file: Path, text: str, most: int) -> None:
    """Refuse a file's text by its commas and opening brackets, of which each value has one or more.

    Raises
    ------
    ModelError
        Where they are more than `most`.
    """
    found = sum(text.count(letter) for letter in ",[{")
    if found > most:
        raise ModelError(
            f"{file} has {found} values, and such a file has {most} at most: it is not what it "
            "should be, get the model anew"
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"'{name[:80]}' is there twice")
        content[name] = value
    return content


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large a number")
    return value
