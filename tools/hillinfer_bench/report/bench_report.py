# SPDX-License-Identifier: Apache-2.0
"""The report of a run, as JSON and as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from hillinfer.system.files import cannot_write, write_whole
from hillinfer.values import format_bytes
from hillinfer_bench.report import other_reports
from hillinfer_bench.report.goals import (
    GOALS,
    goal_records,
    joined_goal_records,
    joined_ratios,
    memory_goal_records,
    memory_ratios,
    quality_goal_records,
    reached,
    speed_ups,
)
from hillinfer_bench.report.other_reports import Figure
from hillinfer_bench.report.rows import (
    LARGEST_SPREAD,
    LIMIT_LABEL,
    BenchRow,
    MachineRates,
)
from hillinfer_bench.systems.case import MODELLED
from hillinfer_bench.systems.stretching import STRETCHING_RULE


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
        Measured at the start; limits are modelled with the best of these and of each row's own.
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
                *joined_goal_records(rows),
                *quality_goal_records(rows),
                *other_reports.other_goal_records(out.parent),
            )
        ],
        "speed_ups": [{**asdict(up), "share_of_allowed": up.share_of_allowed} for up in ups],
        "ratios": [asdict(one) for one in (*memory_ratios(rows), *joined_ratios(rows))],
        "limits": {
            "label": LIMIT_LABEL,
            "memory_gbps": rates.memory / 1e9,
            "drive_gbps": rates.drive / 1e9,
            "read_us": rates.read_seconds * 1e6,
            "rates": "measured at the start; each row has the best, its own turns' among them",
        },
        "beta": other_reports.beta_sweep(out.parent),
        "selections": {"label": MODELLED, "rule": STRETCHING_RULE, "checks": list(checks)},
        "rows": [row_record(row) for row in rows],
    }


def row_record(row: BenchRow) -> dict[str, Any]:
    """Return a row as the report has it, with its name and the reasons to doubt its figures."""
    doubts = {} if row.median_ms is None else {"flagged": row.flagged, "flags": list(row.flags)}
    return {"name": row.name, **asdict(row), **doubts}


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
    scalars["reference_gbps"] = other_reports.reference_gbps(folder)
    scalars["fio_gbps"] = other_reports.fio_gbps(folder)
    scalars["beta_regret"] = other_reports.beta_regret(folder)
    return scalars


_HEADINGS = (
    "system", "min ms", "median ms", "spread", "limit ms", "/limit", "KV ms", "tokens/s",
    "drive/step", "held", "RSS", "hits", "predicted", "perplexity", "agrees",
)  # fmt: skip


def table_text(rows: Sequence[BenchRow], report: Mapping[str, Any]) -> str:
    """Return a Markdown table per case, then ratios, then goals beside what was reached."""
    parts = []
    for _, grouped in groupby(rows, key=lambda row: row.case):
        own = list(grouped)
        first = own[0]
        title = first.name.removesuffix(f", {first.system}")
        parts.append(f"{title}; {first.selection}\n\n" + _aligned([_HEADINGS, *map(_cells, own)]))
        flagged = [f"{row.system}: {'; '.join(row.flags)}" for row in own if row.flagged]
        if flagged:
            parts.append("flagged: " + "\n".join(flagged))
        skipped = [f"{row.system}: {row.skipped}" for row in own if row.skipped is not None]
        if skipped:
            parts.append("not measured: " + "; ".join(skipped))
    parts += [_aligned(lines) for lines in _ratios(report) if len(lines) > 1]
    goals = [("goal", "reached", "met", "flagged", "row")]
    for goal in report["goals"]:
        met = {True: "yes", False: "no", None: "-"}[goal["met"]]
        value = "-" if goal["reached"] is None else _marked(goal["reached"], goal)
        noisy = {True: "yes", False: "no", None: "-"}[goal["flagged"]]
        goals.append((goal["goal"], value, met, noisy, goal["row"] or "-"))
    parts.append(_aligned(goals))
    if report.get("beta"):
        parts.append(_beta_text(report["beta"]))
    parts.append(
        "! says that a row, or one behind the ratio, is flagged: its steps' spread is above 20 %, "
        "or a step was faster than its limit. Repeat on a quieter machine; such rows meet no goal. "
        "KV ms: without the loop's floor. limit: modelled from counted "
        "bytes and this machine's rates. /limit: median over the KV's limit, "
        "large where computing binds."
    )
    return "\n\n".join(parts)


def _ratios(report: Mapping[str, Any]) -> tuple[list[tuple[str, ...]], ...]:
    """Return a table of the speed-ups and one of the other ratios, with their headings."""
    ups: list[tuple[str, ...]] = [("speed-up", "measured", "KV alone", "allowed", "of it", "row")]
    for up in report["speed_ups"]:
        kv = "" if up["kv_value"] is None else _marked(up["kv_value"], up)
        share = _marked(up["share_of_allowed"], up)
        allowed = _number(up["allowed"], 2)
        ups.append((up["name"], _marked(up["value"], up), kv, allowed, share, up["row"]))
    others: list[tuple[str, ...]] = [("ratio", "measured", "allowed", "row", "against")]
    for one in report["ratios"]:
        value = _marked(one["value"], one)
        allowed = _number(one["allowed"], 2)
        others.append((one["name"], value, allowed, one["row"], one["against"].split(", ")[-1]))
    return ups, others


def _beta_text(sweep: Mapping[str, Any]) -> str:
    """Return latencies over β as a table."""
    models = list(dict.fromkeys(kind for row in sweep["rows"] for kind in row["modelled_seconds"]))
    lines = [
        ("β", "host segments", "min ms", "median ms", *(f"{one} (modelled)" for one in models))
    ]
    for row in sweep["rows"]:
        beta = "all on the host" if row["beta"] is None else f"{row['beta']:.3g}"
        lines.append(
            (
                f"auto: {beta}" if row["name"] == "auto" else beta,
                str(row["host_segments"]),
                _number(1e3 * row["seconds"], 2),
                _number(1e3 * row["median_seconds"], 2),
                *(_number(1e3 * row["modelled_seconds"].get(one, 0.0), 2) for one in models),
            )
        )
    title = f"β, {sweep['shape']}, {sweep['tokens']} tokens; {sweep['label']}"
    return f"{title}\n\n" + _aligned(lines)


def _cells(row: BenchRow) -> tuple[str, ...]:
    if row.median_ms is None or row.spread is None:
        return (row.system, "not measured", *[""] * (len(_HEADINGS) - 2))
    return (
        row.system,
        _number(row.min_ms, 2),
        _number(row.median_ms, 2),
        f"{row.spread:.0%}" + ("!" if row.spread > LARGEST_SPREAD else ""),
        _number(row.limit_ms, 2) + ("!" if row.beats_limit else ""),
        # What the model costs without a context has no limit of its own.
        _number(row.median_ms / row.kv_limit_ms if row.kv_limit_ms and row.kv_ms else None, 1),
        _number(row.kv_ms, 2),
        _number(row.tokens_per_second, 2),
        format_bytes(row.drive_read_bytes or 0),
        format_bytes(row.held_bytes or 0),
        format_bytes(row.rss_bytes or 0),
        _number(row.hit_rate, 3),
        "" if row.predicted_layers is None else f"{row.predicted_layers} of {row.layers}",
        _number(row.perplexity, 3),
        _number(row.agreement, 3),
    )


def _marked(value: float, behind: Mapping[str, Any]) -> str:
    return f"{value:.2f}" + ("!" if behind["flagged"] else "")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    head, *others = (
        [text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines
    )
    rule = ["-" * width for width in widths]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *others))
