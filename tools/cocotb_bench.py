# SPDX-License-Identifier: Apache-2.0
"""Run the cocotb bench on the kernels of its table, or on RTL that Vitis HLS exported.

Writes build/reports/cocotb.json, one row per kernel, simulator and test. Ends with 1 where a test
fails or a byte differs, with 2 where a tool is missing or an export is none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "sw_model", "tests/hw", "tests/sw_model")]

from cocotb_kernels import COCOTB_KERNELS, CocotbKernel, preset_kernel  # noqa: E402

from hillinfer_hw.cocotb_bench import BenchResult, run_bench, save_case  # noqa: E402
from hillinfer_hw.cpu_time import cpu_seconds  # noqa: E402
from hillinfer_hw.import_export import check_export, import_export  # noqa: E402
from hillinfer_hw.rtl_files import RtlSource, render_rtl  # noqa: E402
from hillinfer_hw.toolchain import MissingToolError  # noqa: E402
from hillinfer_model.choices import KeyMode, Rule  # noqa: E402
from hillinfer_model.presets import PRESETS  # noqa: E402

SIMULATORS = ("verilator", "icarus")


@dataclass(frozen=True)
class Job:
    """One kernel in one simulator; `preset` is `-` where its shape is no model's."""

    name: str
    preset: str
    kernel: CocotbKernel
    source: RtlSource
    simulator: str


def run(job: Job, folder: Path) -> BenchResult:
    """Build the simulator of a job anew and run the bench in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case = folder / "case.npz"
    save_case(case, job.kernel.spec, job.kernel.launch)
    return run_bench(job.source, case, job.simulator, folder)


def rows_of(job: Job, result: BenchResult) -> list[dict[str, Any]]:
    """Return a row per test, with what its launches add up to."""
    spec = job.kernel.spec
    rows = []
    for name in (*result.passed, *result.failed):
        own = [launch for launch in result.launches if launch["test"] == name]
        sums = {
            key: sum(launch[key] for launch in own) for key in ("tokens", "mismatches", "cycles")
        }
        rows.append(
            {
                "kernel": job.kernel.name,
                "preset": job.preset,
                "shape": f"{spec.head_dim}, {spec.kv_heads}, {spec.group_size}",
                "mode": spec.key_mode.value,
                "rule": spec.rule.value if job.kernel.scope is not None else "-",
                "scope": job.kernel.scope.value if job.kernel.scope is not None else "-",
                "execution": "rtl",
                "origin": job.source.origin,
                "simulator": job.simulator,
                "memory": "cocotb",
                "test": name,
                "ok": name in result.passed,
                "launches": len(own),
                **sums,
            }
        )
    return rows


def main() -> int:
    """Run the table, or one export, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulator", nargs="+", choices=SIMULATORS, default=list(SIMULATORS))
    parser.add_argument("--kernel", nargs="+", choices=list(COCOTB_KERNELS), help="of the table")
    parser.add_argument(
        "--export", type=Path, help="an export's folder: the solution or syn/verilog"
    )
    parser.add_argument(
        "--preset", choices=list(PRESETS), help="the export's spec, with --mode, --rule"
    )
    parser.add_argument("--mode", choices=list(KeyMode), default=KeyMode.INT4)
    parser.add_argument("--rule", choices=list(Rule), default=Rule.WEIGHT_SUM)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "reports" / "cocotb.json")
    given = parser.parse_args()
    try:
        jobs = _jobs(given)
    except ValueError as error:
        print(f"cocotb: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    status, start = 0, time.monotonic()
    for job in jobs:
        folder = ROOT / "build" / "cocotb" / f"{job.source.origin}-{job.name}-{job.simulator}"
        try:
            result = run(job, folder)
        except (MissingToolError, RuntimeError) as error:
            print(f"cocotb: {job.name}, {job.simulator}: {error}", file=sys.stderr)
            status = 2
            continue
        own = rows_of(job, result)
        rows += own
        minutes = round(cpu_seconds() / 60, 1)
        report = {"label": "RTL simulation in cocotb", "cpu_minutes": minutes, "rows": rows}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        wrong = sum(row["mismatches"] for row in own)
        print(
            f"{job.name:16} {job.simulator:9} {len(result.passed)} tests passed, "
            f"{len(result.failed)} failed, {len(result.skipped)} skipped, "
            f"{sum(row['tokens'] for row in own)} tokens, {wrong} mismatches"
            + "".join(f"\n  FAILED {name}: {folder / 'test.log'}" for name in result.failed),
            flush=True,
        )
        if result.failed or wrong or not result.passed:
            status = max(status, 1)
    print(
        f"cocotb: {len(rows)} rows, {cpu_seconds() / 60:.1f} CPU minutes in "
        f"{(time.monotonic() - start) / 60:.1f} minutes: {given.out}"
    )
    return status


def _jobs(given: argparse.Namespace) -> list[Job]:
    if given.export is None:
        names = given.kernel or list(COCOTB_KERNELS)
        kernels = [(name, COCOTB_KERNELS[name]) for name in names]
        return [
            Job(name, "-", kernel, render_rtl(kernel.spec, kernel.name), simulator)
            for name, kernel in kernels
            for simulator in given.simulator
        ]
    source = import_export(given.export)
    if given.preset is not None:
        name = given.preset
        kernel = preset_kernel(source.top, name, KeyMode(given.mode), Rule(given.rule))
    elif given.kernel is not None and len(given.kernel) == 1:
        name = given.kernel[0]
        kernel = COCOTB_KERNELS[name]
    else:
        raise ValueError("an export needs its spec: --preset, --mode and --rule, or one --kernel")
    check_export(source, kernel.spec, kernel.name)
    return [Job(name, given.preset or "-", kernel, source, each) for each in given.simulator]


if __name__ == "__main__":
    sys.exit(main())
