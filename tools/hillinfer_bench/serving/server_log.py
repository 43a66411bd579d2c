# SPDX-License-Identifier: Apache-2.0
"""What a server wrote of its requests, and what its process holds."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hillinfer_bench.serving.servers import RunningServer, ServerError

_QUIET_SECONDS, _LOOK_SECONDS = 120.0, 0.05


def lines(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of a server's log; others are libraries' own."""
    for line in log.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict) and "event" in told:
                yield told


def moment(told: dict[str, Any]) -> float:
    """Return when a line was written, in seconds since 1970."""
    return datetime.fromisoformat(told["time"]).timestamp()


def metrics(server: RunningServer) -> dict[str, float]:
    """Return what `/metrics` tells, sums of each name."""
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    try:
        connection.request("GET", "/metrics", headers=dict(server.headers))
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([a-z_]+)(?:\{.*\})? (\S+)", line)
        if match:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def await_quiet(server: RunningServer) -> None:
    """Wait until no request is worked on.

    Raises
    ------
    ServerError
        Where one is still there after two minutes.
    """
    until = time.monotonic() + _QUIET_SECONDS
    while time.monotonic() < until:
        told = metrics(server)
        if not told["hillinfer_requests_running"] + told["hillinfer_requests_waiting"]:
            return
        time.sleep(_LOOK_SECONDS)
    raise ServerError("requests that nobody waits for are still worked on")


@dataclass(frozen=True)
class Holdings:
    """What a process holds.

    Parameters
    ----------
    threads, files
        How many, files with what else has a descriptor.
    resident_bytes
        Memory that is its own; pages of files that are mapped are left out.
    """

    threads: int
    files: int
    resident_bytes: int

    @classmethod
    def of(cls, server: RunningServer) -> Holdings:
        """Look at a server's process."""
        place = Path(f"/proc/{server.process.pid}")
        status = (place / "status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        return cls(
            len([*(place / "task").iterdir()]),
            len([*(place / "fd").iterdir()]),
            int(found[1]) << 10 if found else 0,
        )
