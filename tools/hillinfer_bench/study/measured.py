# SPDX-License-Identifier: Apache-2.0
"""Figures 12 to 16 as this machine measured them, from a report of `hillinfer-bench decode`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hillinfer.errors import SettingsError, reason_of
from hillinfer.system.files import read_plain
from hillinfer_bench.decode.plan import PAPER_BASELINES
from hillinfer_bench.study.machines import CLAIMS
from hillinfer_bench.systems.table import ABLATION, FLOOR, HILLINFER

DECODE_FILE = "bench-paper.json"
DECODE_COMMAND = f"hillinfer-bench decode --plan paper --out build/reports/{DECODE_FILE}"
_FIGURE = "figure "
_MOST_BYTES = 1 << 26
_COLUMNS = (FLOOR, *PAPER_BASELINES, HILLINFER)
_KEPT = (
    *("model", "layers", "all_layers", "context", "batch", "alpha", "budget_share", "part"),
    *("system", "median_ms", "spread", "limit_ms", "drive_read_bytes", "tokens_per_second"),
    "skipped",
)


def measured_record(file: Path) -> dict[str, Any]:
    """Return the rows of a decode report that are of the paper's figures.

    Parameters
    ----------
    file
        Of `DECODE_COMMAND`.

    Raises
    ------
    SettingsError
        Where it cannot be read, or has no such rows.
    """
    try:
        report = json.loads(read_plain(file, _MOST_BYTES).decode("utf-8"))
        rows = [
            {name: row[name] for name in _KEPT} | {"flags": row.get("flags", [])}
            for row in report["rows"]
            if row["part"].startswith(_FIGURE)
        ]
        kind = {name: report[name] for name in ("processor", "processor_variant", "number_type")}
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {reason_of(error)}: {DECODE_COMMAND}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingsError(f"{file} is no report of `{DECODE_COMMAND}`") from error
    if not rows:
        raise SettingsError(f"{file} has no rows of the paper's figures: {DECODE_COMMAND}")
    return {"label": "measured; weights and rows are random", **kind, "rows": rows}


def measured_table(record: Mapping[str, Any]) -> str:
    """Return a table as Markdown for each figure, milliseconds of a step and speed-ups."""
    parts = dict.fromkeys(row["part"] for row in record["rows"])
    return "\n\n".join(
        _part_table(part, [row for row in record["rows"] if row["part"] == part])
        for part in sorted(parts)
    )


def _part_table(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    figures = part.removeprefix(_FIGURE).split(", ")
    claims = "; ".join(CLAIMS[one] for one in figures)
    columns = ABLATION if any(row["system"] in ABLATION for row in rows) else _COLUMNS
    is_compared = columns is _COLUMNS
    heads = ["model", "tokens", "batch", "M0", *columns]
    if is_compared:
        heads.append(f"times as fast as {', '.join(PAPER_BASELINES)}")
    lines = [
        f"{part.capitalize()}, milliseconds of a step; the paper claims: {claims}",
        "",
        "| " + " | ".join(heads) + " |",
        "|---|---:|---:|---:|" + "---:|" * len(columns) + "---|" * is_compared,
    ]
    cases: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        key = row["model"], row["context"], row["batch"], row["budget_share"]
        cases.setdefault(key, {})[row["system"]] = row
    for (model, context, batch, share), own in cases.items():
        any_row = next(iter(own.values()))
        built = f"{model}, {any_row['layers']} of {any_row['all_layers']} layers"
        cells = [built, f"{context:,}", str(batch), f"{share:.0%} of the KV"]
        cells += [_milliseconds(own.get(name)) for name in columns]
        if is_compared:
            cells.append(", ".join(_times(own, name) for name in PAPER_BASELINES))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _milliseconds(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["median_ms"] is None:
        return str(row["skipped"])
    return f"{row['median_ms']:.0f}{'!' if row['flags'] else ''}"


def _times(rows: Mapping[str, Mapping[str, Any]], rival: str) -> str:
    """Return the rival's time over HillInfer's, and what bytes and rates allow."""
    own, other = rows.get(HILLINFER), rows.get(rival)
    if own is None or other is None or not own["median_ms"] or other["median_ms"] is None:
        return "-"
    mark = "!" if own["flags"] or other["flags"] else ""
    ratio = f"{other['median_ms'] / own['median_ms']:.1f}{mark}"
    if not own["limit_ms"] or not other["limit_ms"]:
        return ratio
    return f"{ratio} ({other['limit_ms'] / own['limit_ms']:.1f} allowed)"
