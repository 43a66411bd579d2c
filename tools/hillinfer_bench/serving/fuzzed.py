# SPDX-License-Identifier: Apache-2.0
"""Requests that a schema fuzzer makes: none ends with status 500, none hangs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from hillinfer_bench.serving.server_log import await_quiet, lines
from hillinfer_bench.serving.servers import RunningServer, ServerError
from hillinfer_bench.serving.sittings import Sitting

_PROGRAM = "from schemathesis.cli import schemathesis; schemathesis()"
# Routes that take a body; those without one have nothing to be odd about.
_ROUTES = 6
# A route is asked by one of them, so all routes are asked at once.
_WORKERS = _ROUTES
_SECONDS = 7200
# Asked for by whoever measures.
_OWN_PATHS = frozenset({"/metrics", "/openapi.json"})


@dataclass(frozen=True)
class FuzzedRow:
    """What came of the requests.

    Parameters
    ----------
    asked
        How many there were.
    statuses
        How many had which status.
    slowest_seconds
        Of a request, as the server's log tells.
    wanted
        Requests in the end, maybe of several runs.
    sittings
        Those runs, each with a seed of its own.
    """

    asked: int
    statuses: dict[str, int]
    slowest_seconds: float
    wanted: int = 0
    sittings: list[Sitting] = field(default_factory=list)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> FuzzedRow:
        """Return what a report has."""
        return cls(**{**record, "sittings": [Sitting(**one) for one in record["sittings"]]})

    @property
    def defects(self) -> int:
        """Requests that ended with status 500, or with none."""
        return sum(count for status, count in self.statuses.items() if status in ("500", "None"))


def measure_fuzzed(
    server: RunningServer,
    count: int,
    before: FuzzedRow | None = None,
    seconds: float | None = None,
) -> FuzzedRow:
    """Let schemathesis ask; what is counted is what the server's log tells.

    Parameters
    ----------
    server
        Who is asked; bounds of it keep answers short.
    count
        Requests in the end, about.
    before
        What earlier runs came to; this one has the next seed. None for a first one.
    seconds
        After so long no more is asked; None: all are.

    Raises
    ------
    ServerError
        Where schemathesis is not installed, or asked nothing.
    """
    if find_spec("schemathesis") is None:
        raise ServerError("schemathesis is not installed: make serve-fuzz installs and calls it")
    assert server.log is not None
    so_far = before or FuzzedRow(0, {}, 0.0, count)
    seed, logged = 1 + len(so_far.sittings), len(_told(server))
    each = max(1, -(-(count - so_far.asked) // _ROUTES))
    ended = subprocess.run(
        [
            *(sys.executable, "-c", _PROGRAM, "run", f"{server.url}/openapi.json"),
            *("--phases", "fuzzing", "--max-examples", str(each), "--seed", str(seed)),
            *("--no-shrink", "--workers", str(_WORKERS)),
            *(() if seconds is None else ("--max-time", str(max(1, int(seconds))))),
            *("--checks", "not_a_server_error", "--request-timeout", "60", "--continue-on-failure"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    await_quiet(server)
    told = _told(server)[logged:]
    if len(told) < (each if seconds is None else 1):
        said = re.sub(r"\s+", " ", ended.stdout + ended.stderr)[-400:]
        raise ServerError(f"schemathesis asked {len(told)} times: {said}")
    statuses = Counter(so_far.statuses)
    statuses.update(str(one.get("status")) for one in told)
    return FuzzedRow(
        so_far.asked + len(told),
        dict(statuses),
        max(so_far.slowest_seconds, *(one["seconds"] for one in told)),
        count,
        [*so_far.sittings, Sitting.now(so_far.asked, len(told), seed)],
    )


def _told(server: RunningServer) -> list[dict[str, Any]]:
    """Return the log's lines of requests, but for those of whoever measures."""
    assert server.log is not None
    return [
        one
        for one in lines(server.log)
        if one["event"] == "request" and one.get("path") not in _OWN_PATHS
    ]
