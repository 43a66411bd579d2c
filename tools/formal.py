# SPDX-License-Identifier: Apache-2.0
"""Prove the AXI engines and FIFOs for bounded time; each property must catch its mutants.

Writes build/reports/formal.json, one row per bench and mutant.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "sw_model")]

from hillinfer_hw.formal import BENCHES_TABLE, FormalBench, check  # noqa: E402


def rows_of(bench: FormalBench) -> list[dict[str, Any]]:
    """Return the rows of one bench: its properties, its covers, its mutants."""
    rows = []
    for mode in ("bmc", "cover"):
        result = check(bench, mode=mode)
        rows.append(_row(bench, mode, "", result.passed, result.failed_property, result.seconds))
    for name, mutant in bench.mutants.items():
        result = check(bench, mutant)
        caught = not result.passed and result.failed_property in mutant.caught_by
        rows.append(_row(bench, "bmc", name, caught, result.failed_property, result.seconds))
    return rows


def _row(
    bench: FormalBench,
    check_name: str,
    mutant: str,
    holds: bool,  # noqa: FBT001 - a column, not a switch
    failed: str,
    seconds: float,
) -> dict[str, Any]:
    """Return a row; for a mutant it holds where the right property failed."""
    verdict = "ok" if holds else "WRONG"
    print(
        f"{verdict:5} {bench.name}, {check_name}, {mutant or 'as it is'}: {failed or 'no failure'}"
    )
    return {
        # The benches' sources are the same for every kernel.
        **dict.fromkeys(("preset", "mode", "rule", "memory"), "-"),
        "execution": "rtl",
        "simulator": "yosys-smtbmc",
        "bench": bench.name,
        "parameters": dict(bench.parameters),
        "check": check_name,
        "depth": bench.depth,
        "mutant": mutant,
        "ok": holds,
        "failed_property": failed,
        "seconds": round(seconds, 1),
    }


def main() -> int:
    """Run all benches, or those whose name contains a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", default="", help="only benches whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "reports" / "formal.json")
    arguments = parser.parse_args()
    benches = [bench for bench in BENCHES_TABLE if arguments.bench in bench.name]
    rows = [row for bench in benches for row in rows_of(bench)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return int(not rows or not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
