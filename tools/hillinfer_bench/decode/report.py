# SPDX-License-Identifier: Apache-2.0
"""The report of a run, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hillinfer.output_file import cannot_write, write_whole
from hillinfer_bench.decode import other_reports
from hillinfer_bench.decode.case import MODELLED
from hillinfer_bench.decode.goals import GOALS, goal_records, reached, speed_ups
from hillinfer_bench.decode.limit import LABEL
from hillinfer_bench.decode.memory_goals import memory_goal_records, memory_ratios
from hillinfer_bench.decode.other_reports import Figure
from hillinfer_bench.decode.quality_goals import quality_goal_records
from hillinfer_bench.decode.rates import MachineRates
from hillinfer_bench.decode.row import BenchRow
from hillinfer_bench.decode.timing import LARGEST_SPREAD
from hillinfer_bench.replay.stretching import RULE


def bench_report(
    rows: Sequence[BenchRow],
    facts: Mapping[str, Any],
    rates: MachineRates,
    checks: Sequence[Mapping[str, Any]],
    out: Path,
) -> dict[str, Any]:
    """Return the report.

    Parameters
    ----------
    rows
        All of them, those that were skipped, too.
    facts
        What a repetition needs.
    rates
        What limits were modelled with.
    checks
        How local stretched selections were.
    out
        Where it will lie; reports of other benchmarks are looked for beside it.
    """
    ups = speed_ups(rows)
    scalars = _scalars(rows, rates, out.parent)
    return {
        "label": "measured; rows with random weights replay selections (see `selections`), limits "
        "are modelled",
        **facts,
        "largest_spread": LARGEST_SPREAD,
        **{name: one.value for name, one in scalars.items()},
        "scalars": {name: asdict(one) for name, one in scalars.items()},
        "goals": [
            asdict(one)
            for one in (
                *goal_records(ups),
                *memory_goal_records(rows),
                *quality_goal_records(rows),
                *other_reports.other_goal_records(out.parent),
            )
        ],
        "speed_ups": [{**asdict(up), "share_of_allowed": up.share_of_allowed} for up in ups],
        "ratios": [asdict(one) for one in memory_ratios(rows)],
        "limits": {
            "label": LABEL,
            "memory_gbps": rates.memory / 1e9,
            "drive_gbps": rates.drive / 1e9,
        },
        "beta": other_reports.beta_sweep(out.parent),
        "selections": {"label": MODELLED, "rule": RULE, "checks": list(checks)},
        "rows": [{"name": row.name, **asdict(row)} for row in rows],
    }


def write_bench_report(file: Path, report: Mapping[str, Any]) -> None:
    """Write the report.

    Raises
    ------
    ReportError
        Where the file cannot be written.
    """
    # A report with a number that is none is a defect, and JSON has no word for it.
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        write_whole(file, f"{text}\n".encode(errors="backslashreplace"))
    except OSError as error:
        raise cannot_write(file, error, "--out") from error


def _scalars(rows: Sequence[BenchRow], rates: MachineRates, folder: Path) -> dict[str, Figure]:
    ups = speed_ups(rows)
    scalars = {}
    for goal in GOALS:
        up = reached(goal, ups)
        scalars[goal.name] = (
            Figure(up.value, f"{up.row} against {up.against}")
            if up
            else Figure(None, f"no case has both {goal.system} and {' or '.join(goal.rivals)}")
        )
    machine = other_reports.machine_read_gbps(folder)
    drive = other_reports.drive_gbps(folder)
    scalars["scorer_gbps"] = other_reports.scorer_gbps(folder)
    scalars["machine_read_gbps"] = (
        machine
        if machine.value is not None
        else Figure(rates.memory / 1e9, "measured at the start of this run")
    )
    scalars["drive_gbps"] = (
        drive
        if drive.value is not None
        else Figure(rates.drive / 1e9, "reads of 1 MiB, the fastest at the start of this run")
    )
    scalars["fio_gbps"] = other_reports.fio_gbps(folder)
    scalars["beta_regret"] = other_reports.beta_regret(folder)
    return scalars
