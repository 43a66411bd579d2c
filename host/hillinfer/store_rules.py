# SPDX-License-Identifier: Apache-2.0
"""Rules of a store that its user sets: admission, eviction, and limits of writing.

The rules lie in a file of their own, so that changing one changes nothing else of a store.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from hillinfer.errors import HillInferError, reason_of, way_out
from hillinfer.system.files import read_plain, write_whole

RULES_FILE = "rules.json"
_MOST_BYTES = 1 << 16


class Maker(StrEnum):
    """Engines whose rows a store may have."""

    HILLINFER = "hillinfer"
    VLLM = "vllm"


class StoreRulesError(HillInferError):
    """The rules of a store cannot be read or written."""


@dataclass(frozen=True)
class StoreRules:
    """What a store keeps to.

    Parameters
    ----------
    max_writes_per_day
        Bytes that may be written within any 24 hours, by all processes; None for no cap.
    eviction, admission
        Names of the policies that say what goes and what comes in; None for the default ones.
    """

    max_writes_per_day: int | None = None
    eviction: str | None = None
    admission: str | None = None

    @classmethod
    def read(cls, directory: Path) -> StoreRules:
        """Return the rules of a store, the default ones where none were written.

        Raises
        ------
        StoreRulesError
            Where the file is not what `write` writes.
        """
        file = directory / RULES_FILE
        try:
            said = json.loads(read_plain(file, _MOST_BYTES))
            names = {field.name for field in fields(cls)}
            if not isinstance(said, dict) or not said.keys() <= names:
                raise ValueError("it has other names")
            cap = said.get("max_writes_per_day")
            if cap is not None and (type(cap) is not int or cap < 0):
                raise ValueError("max_writes_per_day is no number of bytes")
            return cls(cap, _name(said, "eviction"), _name(said, "admission"))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise StoreRulesError(
                f"the rules of the store {directory} cannot be read: {reason_of(error)}; "
                f"{way_out(error, 'write them anew with hillinfer store set')}"
            ) from error
        except ValueError as error:
            raise StoreRulesError(
                f"{file} holds no rules of a store ({error!s:.200}): remove it, and write them "
                "anew with hillinfer store set"
            ) from error

    def write(self, directory: Path) -> None:
        """Write the rules, whole or not at all; who has the store open keeps to the old ones.

        Raises
        ------
        StoreRulesError
            Where they cannot be written.
        """
        said = {name: value for name, value in asdict(self).items() if value is not None}
        try:
            write_whole(directory / RULES_FILE, json.dumps(said, indent=1).encode())
        except OSError as error:
            raise StoreRulesError(
                f"the rules of the store {directory} cannot be written: {reason_of(error)}; "
                f"{way_out(error, 'choose another --store')}"
            ) from error


def _name(said: dict[str, Any], name: str) -> str | None:
    value = said.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is no name")
    return value
