# SPDX-License-Identifier: Apache-2.0
"""Hold the HLS C++ against golden: every preset, key mode, rule and scope, byte for byte.

Writes build/reports/csim.json. Every row runs all cases of the tests' table (random, adversarial,
wrong descriptors) and, where the real model is present, its recorded keys. The threaded execution
runs processes as threads over bounded streams, so that a FIFO that is too shallow deadlocks, and
every launch has other delays of 0 to 32 rounds on the streams that pipelines write. Kernels that
cast rows also run with room for 8 beats between centring and rounding: that must deadlock.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.system.files import user_cache_dir
from hillinfer_hw.cpu_time import cpu_seconds
from hillinfer_hw.csim import CsimError, CsimExecution
from hillinfer_hw.csim_build import Scheduling
from hillinfer_hw.shard import add_shard
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_result import LaunchResult
from hillinfer_model.presets import PRESETS, preset_spec

ROOT = Path(__file__).resolve().parents[1]
# The table of cases lies with the tests, which are no package.
sys.path += [str(ROOT / part) for part in ("tests/hw", "tests/sw_model")]
CASES: Any = import_module("launch_cases")
REPORTS = ROOT / "build" / "reports"
# Of `hw/testbench/threads/pipelines.h`.
LARGEST_SKEW = 32


@dataclass(frozen=True)
class Job:
    """One kernel of one execution; its scopes become rows of their own."""

    kernel: str
    preset: str
    mode: KeyMode
    rule: Rule
    scheduling: Scheduling

    @property
    def spec(self) -> KernelSpec:
        """The kernel's."""
        return preset_spec(self.preset, self.mode, self.rule)


def jobs(presets: list[str], executions: list[str]) -> Iterator[Job]:
    """Yield every kernel of the table.

    make_shadow knows no rule: one is enough. The rule changes neither processes nor streams, so
    threads run one as well, the one with the wider words.
    """
    for preset in presets:
        for mode in KeyMode:
            for scheduling in Scheduling:
                if CsimExecution(scheduling).name not in executions:
                    continue
                threads = scheduling is Scheduling.THREADS
                for rule in [Rule.WEIGHT_SUM] if threads else list(Rule):
                    yield Job("score_tokens", preset, mode, rule, scheduling)
                if mode is not KeyMode.FP16:
                    yield Job("make_shadow", preset, mode, Rule.WEIGHT_SUM, scheduling)


def run(job: Job, recorded: Any) -> list[dict[str, Any]]:
    """Return the rows of one kernel."""
    if job.kernel == "make_shadow":
        return [_row(job, None, recorded)]
    return [_row(job, scope, recorded) for scope in Scope]


def _row(job: Job, scope: Scope | None, recorded: Any) -> dict[str, Any]:
    execution = CsimExecution(job.scheduling)
    start = cpu_seconds()
    tokens = mismatches = launches = 0
    faults = []
    for number, (case, launch) in enumerate(_launches(job.spec, scope, recorded)):
        if job.scheduling is Scheduling.THREADS:
            execution = replace(execution, seed=number + 1)
        if scope is None:
            expected = run_shadow_launch(job.spec, launch)
        else:
            expected = run_score_launch(job.spec, launch)
        launches += 1
        tokens += expected.completed_tokens
        try:
            if scope is None:
                found = execution.make_shadow(job.spec, launch)
            else:
                found = execution.score(job.spec, launch)
        except RuntimeError as error:
            faults.append(f"{case}: {error}")
            mismatches += 1
            continue
        mismatches += _differing_words(found, expected)
    shallow = _shallow_deadlocks(job, scope)
    if shallow is False:
        faults.append("room for 8 beats between centring and rounding is enough")
        mismatches += 1
    return {
        "kernel": job.kernel,
        "preset": job.preset,
        "mode": str(job.mode),
        "rule": "-" if job.kernel == "make_shadow" else str(job.rule),
        "scope": "-" if scope is None else str(scope),
        "execution": execution.name,
        "simulator": "g++",
        "memory": "-",
        "launches": launches,
        "recorded_keys": recorded is not None,
        "tokens": tokens,
        "mismatches": mismatches,
        "largest_skew": LARGEST_SKEW if job.scheduling is Scheduling.THREADS else None,
        "shallow_deadlocks": shallow,
        "faults": faults,
        "cpu_minutes": round((cpu_seconds() - start) / 60, 3),
    }


def _shallow_deadlocks(job: Job, scope: Scope | None) -> bool | None:
    """Return whether too little room deadlocks where exponents come late; None: nothing is cast."""
    casts = job.kernel == "make_shadow" or job.mode is KeyMode.FP16
    if job.scheduling is not Scheduling.THREADS or not casts:
        return None
    execution = CsimExecution(
        job.scheduling, {"centred": 8}, {"exponents_to_round": LARGEST_SKEW, "centred": 0}
    )
    try:
        if scope is None:
            execution.make_shadow(job.spec, CASES.random_shadow_launch(job.spec, [70]))
        else:
            execution.score(job.spec, CASES.random_launch(job.spec, scope, [70]))
    except CsimError as error:
        return "DEADLOCK" in str(error)
    return False


def _launches(spec: KernelSpec, scope: Scope | None, recorded: Any) -> Iterator[tuple[str, Any]]:
    real: Any = import_module("recorded_launch")
    tokens = CASES.usual_tokens(spec)
    if scope is None:
        yield from ((name, make(spec, tokens)) for name, make in CASES.SHADOW_CASES.items())
        if recorded is not None:
            yield "recorded", real.recorded_shadow_launch(spec, recorded)
    else:
        yield from ((name, make(spec, scope, tokens)) for name, make in CASES.SCORE_CASES.items())
        if recorded is not None:
            yield "recorded", real.recorded_score_launch(spec, scope, recorded)


def _differing_words(found: LaunchResult, expected: LaunchResult) -> int:
    """Return how many 32-bit words differ in both buffers."""
    return sum(
        int(np.count_nonzero(one.view("<u4") != other.view("<u4")))
        for one, other in (
            (found.output, expected.output),
            (found.status, expected.status),
        )
    )


def recorded_keys(folder: Path | None) -> Any:
    """Return keys and a query of the real model, or None where it is not present."""
    folder = folder or user_cache_dir("models", DEFAULT_MODEL)
    if not (folder / "config.json").is_file():
        print("csim: no real model, so no recorded keys; `make model` fetches it")
        return None
    real: Any = import_module("recorded")
    return real.record_layer(folder)


def main() -> int:
    """Run the table, write the report, and return 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPORTS / "csim.json")
    parser.add_argument("--preset", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    names = [CsimExecution(one).name for one in Scheduling]
    parser.add_argument("--execution", nargs="+", choices=names, default=names)
    parser.add_argument("--model", type=Path, help="folder of the real model; else the fetched one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    add_shard(parser)
    chosen = parser.parse_args()

    recorded = recorded_keys(chosen.model)
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    table = chosen.shard.part(list(jobs(chosen.preset, chosen.execution)))
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for done in as_completed([pool.submit(run, job, recorded) for job in table]):
            for row in done.result():
                rows.append(row)
                place = (row[key] for key in ("kernel", "preset", "mode", "rule", "scope"))
                print(
                    f"{row['execution']:13}", *place, f"{row['tokens']} tokens,",
                    f"{row['mismatches']} mismatches, {row['cpu_minutes']} CPU minutes",
                    *row["faults"][:1], flush=True,
                )  # fmt: skip
            _write(chosen.out, rows, time.monotonic() - start)
    wrong = sum(row["mismatches"] for row in rows)
    minutes = sum(row["cpu_minutes"] for row in rows)
    print(f"csim: {len(rows)} rows, {wrong} mismatches, {minutes:.1f} CPU minutes: {chosen.out}")
    return 1 if wrong else 0


def _write(path: Path, rows: list[dict[str, Any]], seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    order = ("execution", "kernel", "preset", "mode", "rule", "scope")
    ordered = sorted(rows, key=lambda row: tuple(str(row[key]) for key in order))
    report = {
        "label": "csim (HLS C++ compiled with g++)",
        "cpu_minutes": round(sum(row["cpu_minutes"] for row in rows), 2),
        "wall_minutes": round(seconds / 60, 2),
        "rows": ordered,
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
