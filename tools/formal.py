# SPDX-License-Identifier: Apache-2.0
"""Prove the AXI engines, the FIFOs and the arithmetic units; each property must catch its mutants.

Writes build/reports/formal.json, one row per bench and check, as they come. A row says how far its
proof reaches: bounded (so many cycles from reset), induction (for ever) or all inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "sw_model")]

from hillinfer_hw.cpu_time import cpu_seconds  # noqa: E402
from hillinfer_hw.formal import check  # noqa: E402
from hillinfer_hw.formal_bench import FormalBench  # noqa: E402
from hillinfer_hw.formal_benches import BENCHES_TABLE  # noqa: E402
from hillinfer_hw.proof_benches import PROOFS, holds  # noqa: E402
from hillinfer_hw.prove import SolverMissingError  # noqa: E402
from hillinfer_hw.toolchain import MissingToolError  # noqa: E402

# The sources of these benches are the same for every kernel.
COMMON = {
    **dict.fromkeys(("preset", "mode", "rule", "memory"), "-"),
    "execution": "rtl",
    "simulator": "yosys-smtbmc",
}


def rows_of(bench: FormalBench) -> Iterator[dict[str, Any]]:
    """Yield the rows of one bench: its properties, its covers, its mutants."""
    bounded = f"bounded, {bench.depth} cycles"
    checks = [("bmc", bounded), *([("prove", "induction")] if bench.induction else [])]
    for mode, proof in [*checks, ("cover", f"reached in {bench.depth} cycles")]:
        found = check(bench, mode=mode)
        own = {"ok": found.passed, "property": found.failed_property, "seconds": found.seconds}
        yield _row(bench, mode, proof, "", own)
    for name, mutant in bench.mutants.items():
        found = check(bench, mutant)
        caught = not found.passed and found.failed_property == mutant.caught_by
        own = {"ok": caught, "property": mutant.caught_by, "seconds": found.seconds}
        yield _row(bench, "bmc", bounded, name, own)


def _row(
    bench: FormalBench, mode: str, proof: str, mutant: str, own: dict[str, Any]
) -> dict[str, Any]:
    """Return a row; one of a mutant is ok where the property meant for it failed."""
    parameters = dict(bench.parameters)
    row = {**COMMON, "bench": bench.name, "parameters": parameters, "check": mode, "proof": proof}
    return {**row, "depth": bench.depth, "mutant": mutant, **own}


def arithmetic_rows(word: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of arithmetic units by name: each proof, and the change it must refute."""
    for name, proof in PROOFS.items():
        if word not in name:
            continue
        for change in (None, proof.change):
            start = time.monotonic()
            holds_now = holds(proof, change)
            yield {
                **COMMON,
                "bench": name,
                "parameters": dict(proof.parameters),
                "check": "proof",
                "proof": "all inputs",
                "depth": proof.latency + 3,
                "mutant": "" if change is None else f"{change[0]} → {change[1]}",
                "ok": holds_now is (change is None),
                "property": "",
                "seconds": time.monotonic() - start,
            }


def _line(row: dict[str, Any]) -> str:
    what = f"mutant {row['mutant']!r} caught by {row['property']}" if row["mutant"] else "holds"
    verdict = "ok" if row["ok"] else "WRONG"
    return f"{verdict:5} {row['bench']}: {row['proof']} ({row['check']}), {what}"


def main() -> int:
    """Run all benches and proofs, or those whose name contains a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", default="", help="only those whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "reports" / "formal.json")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for row in _all_rows(given.bench):
            rows.append(row | {"seconds": round(row["seconds"], 1)})
            print(_line(row), flush=True)
            # Written as it grows: a run that is cut off leaves what it found.
            report = {"cpu_minutes": round(cpu_seconds() / 60, 1), "rows": rows}
            given.out.write_text(json.dumps(report, indent=1) + "\n")
    except (MissingToolError, SolverMissingError) as error:
        print(f"formal: {error}", file=sys.stderr)
        return 2
    wrong = sum(not row["ok"] for row in rows)
    kept = sum(row["proof"] == "induction" for row in rows)
    print(
        f"formal: {len(rows)} rows, {wrong} wrong, {kept} benches by induction, "
        f"{cpu_seconds() / 60:.1f} CPU minutes: {given.out}"
    )
    return int(not rows or bool(wrong))


def _all_rows(word: str) -> Iterator[dict[str, Any]]:
    for bench in BENCHES_TABLE:
        if word in bench.name:
            yield from rows_of(bench)
    yield from arithmetic_rows(word)


if __name__ == "__main__":
    sys.exit(main())
