# SPDX-License-Identifier: Apache-2.0
"""Requests that a schema fuzzer makes: none ends with status 500, none hangs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec

from hillinfer_bench.serving.server_log import await_quiet, lines
from hillinfer_bench.serving.servers import RunningServer, ServerError

_PROGRAM = "from schemathesis.cli import schemathesis; schemathesis()"
# Routes that take a body; those without one have nothing to be odd about.
_ROUTES = 6
# A route is asked by one of them, so all routes are asked at once.
_WORKERS = _ROUTES
_SECONDS = 7200


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
    """

    asked: int
    statuses: dict[str, int]
    slowest_seconds: float

    @property
    def defects(self) -> int:
        """Requests that ended with status 500, or with none."""
        return sum(count for status, count in self.statuses.items() if status in ("500", "None"))


def measure_fuzzed(server: RunningServer, count: int) -> FuzzedRow:
    """Let schemathesis ask; what is counted is what the server's log tells.

    Parameters
    ----------
    server
        Who is asked; bounds of it keep answers short.
    count
        Requests, about.

    Raises
    ------
    ServerError
        Where schemathesis is not installed, or asked nothing.
    """
    if find_spec("schemathesis") is None:
        raise ServerError("schemathesis is not installed: make serve-fuzz installs and calls it")
    assert server.log is not None
    before = sum(one["event"] == "request" for one in lines(server.log))
    each = max(1, count // _ROUTES)
    ended = subprocess.run(
        [
            *(sys.executable, "-c", _PROGRAM, "run", f"{server.url}/openapi.json"),
            *("--phases", "fuzzing", "--max-examples", str(each), "--seed", "1", "--no-shrink"),
            *("--workers", str(_WORKERS)),
            *("--checks", "not_a_server_error", "--request-timeout", "60", "--continue-on-failure"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    await_quiet(server)
    told = [one for one in lines(server.log) if one["event"] == "request"][before:]
    if len(told) < each:
        said = re.sub(r"\s+", " ", ended.stdout + ended.stderr)[-400:]
        raise ServerError(f"schemathesis asked {len(told)} times: {said}")
    statuses = Counter(str(one.get("status")) for one in told)
    return FuzzedRow(len(told), dict(statuses), max(one["seconds"] for one in told))
