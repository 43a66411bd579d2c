# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench hosts`: its tables and the report."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.system.files import make_folders, prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.hosts.fleet import FleetRow, Machines, Routing
from hillinfer_bench.hosts.fleet_table import entry_cost, fleet_rows, fleet_text, scaled_text
from hillinfer_bench.hosts.request import HostsRequest, Part
from hillinfer_bench.hosts.routing import (
    POLICIES,
    RoutingRow,
    measure_policy,
    routing_text,
    two_replicas,
)
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.serving.streams import Texts
from hillinfer_bench.traces.request_trace import CARRIED_TRACES, RequestTrace

Say = Callable[[str], None]
_REQUESTS_A_DAY = 1e9


def run(request: HostsRequest, say: Say, traces: Sequence[RequestTrace] = ()) -> str:
    """Make the parts that were asked for and return their tables.

    Parameters
    ----------
    request
        Which.
    say
        Takes a line before each step that takes time.
    traces
        Whose copies fleets replay; those that are carried where none is given.

    Raises
    ------
    HillInferError
        Where the model or the place is none.
    ServerError
        Where a server did not start.
    """
    prepare_report(request.out, "--out")
    record: dict[str, Any] = {"model": request.model}
    texts: list[str] = []
    if Part.ROUTING in request.parts:
        rows, kind = _routed(request, say)
        best = rows[0]
        record |= kind.as_record() | {
            "routing": {
                "label": "measured",
                "together": request.together,
                "rows": [asdict(row) | {"hit_share": row.hit_share} for row in rows],
                "first_p50_over_round_robin": best.first_p50 / rows[-1].first_p50,
                "first_p95_over_round_robin": best.first_p95 / rows[-1].first_p95,
            }
        }
        texts.append("measured: two replicas and two stores of this machine\n")
        texts.append(routing_text(rows))
    if Part.FLEET in request.parts:
        machines = Machines()
        entry = entry_cost()
        carried = traces or [RequestTrace.carried(name) for name in CARRIED_TRACES]
        fleet = _fleet(request, machines, say, carried)
        record["fleet"] = {
            "label": "modelled: copies of traces; rates of machines are assumed",
            "machines": asdict(machines),
            "entry": {"label": "measured: the embedded directory"} | asdict(entry),
            "rows": [asdict(row) for row in fleet],
        }
        texts.append("\nmodelled: copies of traces over hosts whose rates are assumed\n")
        texts.append(fleet_text(fleet, machines, entry.bytes_each))
        texts += [
            scaled_text(row, machines, entry.bytes_each, _REQUESTS_A_DAY) for row in _largest(fleet)
        ]
    request.out.write_text(json.dumps(record, indent=1))
    say(f"report: {request.out}")
    return "\n".join(texts)


def _routed(request: HostsRequest, say: Say) -> tuple[list[RoutingRow], MachineKind]:
    outline = ModelOutline.read(ModelSource.locate(request.model, say), NumberType.AUTO)
    texts = Texts(outline.tokenizer)
    make_folders(request.directory)
    place = Path(tempfile.mkdtemp(prefix="hillinfer-hosts-", dir=request.directory))
    try:
        rows = []
        with two_replicas(place, request.model) as replicas:
            for policy in POLICIES:
                say(f"{policy}: {request.documents * request.questions} requests")
                # Documents that no policy before has had read.
                documents = [texts.take(request.document_tokens) for _ in range(request.documents)]
                rows.append(
                    measure_policy(
                        *(place, policy, replicas, documents),
                        *(request.questions, request.together),
                    )
                )
        return rows, MachineKind.here(outline.dtype)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _fleet(
    request: HostsRequest, machines: Machines, say: Say, traces: Sequence[RequestTrace]
) -> list[FleetRow]:
    counts = sorted({1, max(1, request.copies // 4), request.copies})
    done = [0]

    def advanced() -> None:
        done[0] += 1
        say(f"{done[0]} fleets are replayed")

    return fleet_rows(traces, counts, request.share, machines, advanced)


def _largest(rows: list[FleetRow]) -> list[FleetRow]:
    """Return the largest fleet of each trace that brings rows from host to host."""
    found: dict[str, FleetRow] = {}
    for row in rows:
        if row.routing == Routing.TRANSFER and row.failures == "none" and not row.is_capped:
            found[row.trace.partition(" ")[0]] = row
    return list(found.values())
