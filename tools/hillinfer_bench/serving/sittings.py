# SPDX-License-Identifier: Apache-2.0
"""Load that takes several sittings: a run goes on where the last one with its report ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from hillinfer.errors import SettingsError
from hillinfer.system.files import read_plain
from hillinfer_bench.serving.request import ServingRequest

# Reports have kilobytes.
_MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class Sitting:
    """What one run asked of a part.

    Parameters
    ----------
    first
        How many requests earlier runs had asked.
    asked
        How many it asked.
    seed
        That its requests, or their order, were drawn with.
    ended
        When, in UTC.
    """

    first: int
    asked: int
    seed: int
    ended: str

    @classmethod
    def now(cls, first: int, asked: int, seed: int) -> Sitting:
        """Return one that ends now."""
        return cls(first, asked, seed, datetime.now(UTC).isoformat(timespec="seconds"))


def options_of(request: ServingRequest) -> dict[str, Any]:
    """Return what has to be the same in all sittings, as the report has it."""
    sizes = asdict(request.load)
    return {
        "model": request.model,
        "prompt_tokens": request.prompt_tokens,
        "load": {name: sizes[name] for name in ("planted", "fuzzed")},
    }


def earlier(request: ServingRequest) -> Mapping[str, Any]:
    """Return the rows of an earlier run's report by the names of their parts.

    Without sittings, or where there is no report yet, there are none.

    Raises
    ------
    SettingsError
        Where something else is in the report's place, or a run with other options.
    """
    if request.load.sitting_seconds is None or not request.out.exists():
        return {}
    try:
        record: dict[str, Any] = json.loads(read_plain(request.out, _MOST_BYTES).decode())
        wanted = options_of(request)
        found = {name: record[name] for name in wanted}
        found["load"] = {name: record["load"][name] for name in wanted["load"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{request.out} is no report that a sitting can go on with "
            f"({type(error).__name__}): name another --out"
        ) from error
    if found != wanted:
        raise SettingsError(
            f"{request.out} is of a run with {found}, and this one has {wanted}: name another "
            "--out, or the same options"
        )
    return record
