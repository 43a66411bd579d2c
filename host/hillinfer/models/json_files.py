# SPDX-License-Identifier: Apache-2.0
"""JSON files of models, `tokenizer.json` among them, read in bounded time and memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hillinfer.library_calls import ModelError
from hillinfer.values import format_bytes

# --- JSON files ---

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
    return _read_object(file, most_bytes, most_values, _strict)


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


def _read_object(
    file: Path, most_bytes: int, most_values: int, parse: Callable[[str], Any]
) -> dict[str, Any]:
    """Read an object in bounded time; `parse` raises ValueError where a text is no JSON."""
    check_size(file, most_bytes)
    try:
        text = file.read_text(encoding="utf-8")
        check_values(file, text, most_values)
        content = parse(text)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except RecursionError as error:
        raise ModelError(f"cannot read {file}: it is nested too deeply") from error
    except ValueError as error:
        raise ModelError(f"cannot read {file}: it is not JSON in UTF-8 ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"cannot read {file}: it is not a JSON object")
    return content


def _strict(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once, parse_constant=_refused, parse_float=_finite)


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


# --- `tokenizer.json` ---

_MOST_BYTES = 64 << 20
# Four times those of the largest of today, with 262,144 tokens and 514,906 merges.
_MOST_TOKENIZER_VALUES = 1 << 23
# Bytes of text that one byte may become, counted as if every step met its worst letter. Those of
# real tokenizers come to 72: Unicode takes letters apart, and spaces become marks.
_MOST_GROWTH = 1000.0
_MOST_ADDED = 1 << 16
_UNICODE_GROWTH = {"NFD": 4.0, "NFKD": 18.0, "NFC": 3.0, "NFKC": 18.0, "Precompiled": 18.0}
_PARTS = ("normalizer", "decoder")


def check_tokenizer(file: Path) -> None:
    """Refuse a `tokenizer.json` that makes far more text than it is given.

    Its normalizer and its decoder are small programs. Eight replacements of a letter by fifty, one
    after the other, make more text of one letter than any memory holds, in native code that then
    ends the process.

    Raises
    ------
    ModelError
        Then, and where the file is no JSON object or has too many values.
    """
    content = _read_object(file, _MOST_BYTES, _MOST_TOKENIZER_VALUES, json.loads)
    for part in _PARTS:
        growth = _growth(content.get(part))
        if growth > _MOST_GROWTH:
            raise ModelError(
                f"cannot use {file}: its {part} makes up to {growth:.3g} bytes of one, and "
                f"{_MOST_GROWTH:.0f} are the most: it is not what it should be, get the model anew"
            )


def _growth(step: Any) -> float:
    """Return how many bytes one byte may become; what is no step is the library's to refuse."""
    growth, waiting = 1.0, [step]
    while waiting and growth <= _MOST_GROWTH:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        for name in ("normalizers", "decoders"):
            nested = one.get(name)
            waiting += nested if isinstance(nested, list) else []
        growth *= _growth_of_one(one)
    return growth


def _growth_of_one(step: dict[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), _bytes(step.get("content"))
        literal = _bytes(pattern.get("String")) if isinstance(pattern, dict) else 0
        # A regular expression may match nothing at all, before every letter.
        return max(1.0, content / literal) if literal else 1.0 + content
    if kind == "Prepend":
        # Once for a text, which is one letter at least.
        added = _bytes(step.get("prepend"))
        return 1.0 if added <= _MOST_ADDED else float(added)
    return _UNICODE_GROWTH.get(str(kind), 1.0)


def _bytes(text: Any) -> int:
    return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0
