# SPDX-License-Identifier: Apache-2.0
"""Score many tokens with the simulated RTL of every preset, key mode and rule; compare with golden.

Writes build/reports/rtl.json: rows per kernel, scope, memory and length of launch. Cycles are of
the hand-written RTL in simulation: no measurement of a card. Wrong bytes, broken rules of the bus,
throughput below its goals and a cycle model that is off end it with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "sw_model", "tests/hw", "tests/sw_model")]

from launch_builder import (  # noqa: E402
    ScoreSegment,
    ShadowSegment,
    key_value_extra_beats,
    score_launch,
    shadow_launch,
)
from launch_cases import (  # noqa: E402
    SCORE_CASES,
    SHADOW_CASES,
    any_keys,
    any_query,
    base_of,
    usual_tokens,
)

from hillinfer_hw.cpu_time import cpu_seconds  # noqa: E402
from hillinfer_hw.memory_model import IDEAL, REALISTIC, STALLS  # noqa: E402
from hillinfer_hw.rtl import RtlRun, RtlSession, check_outcome  # noqa: E402
from hillinfer_hw.rtl_table import Case, Kernel, cases, kernels  # noqa: E402
from hillinfer_hw.shard import add_shard  # noqa: E402
from hillinfer_model.choices import KeyMode, Rule, Scope  # noqa: E402
from hillinfer_model.cycle_model import score_cycles, shadow_cycles  # noqa: E402
from hillinfer_model.descriptor import Descriptor  # noqa: E402
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch  # noqa: E402
from hillinfer_model.kernel_spec import KernelSpec  # noqa: E402
from hillinfer_model.launch_shape import SegmentShape, row_beats  # noqa: E402
from hillinfer_model.memory_model import BURST_BEATS  # noqa: E402
from hillinfer_model.presets import PRESETS  # noqa: E402
from hillinfer_model.score_launch import ScoreLaunch  # noqa: E402
from hillinfer_model.shadow_launch import ShadowLaunch  # noqa: E402

# Beats per cycle, and of what a shared bus leaves to the key port.
IDEAL_GOAL, REALISTIC_GOAL = 0.98, 0.94
# How far the cycle model may be off: a share, or cycles.
MODEL_SHARE, MODEL_CYCLES = 0.02, 32
TUPLE_BYTES = 4


def any_launch(kernel: Kernel, case: Case, seed: int) -> ScoreLaunch | ShadowLaunch:
    """Return a launch of any keys, queries and statistics a kernel may be given."""
    spec, generator = kernel.spec, np.random.default_rng(seed)
    stored = spec if case.layout == "shadow" else replace(spec, key_mode=KeyMode.FP16)
    keys = [any_keys(stored, generator, count) for count in case.counts]
    if case.layout == "rows":
        keys = [replace(own, extra_beats=key_value_extra_beats(stored)) for own in keys]
    if case.scope is None:
        made = [ShadowSegment(base_of(spec, index), own) for index, own in enumerate(keys)]
        return shadow_launch(spec, made, seed)
    scored = [
        ScoreSegment(base_of(spec, index), own, any_query(spec, generator, 2**12, -40, 0))
        for index, own in enumerate(keys)
    ]
    return score_launch(spec, case.scope, scored, seed)


def model_cycles(spec: KernelSpec, case: Case, launch: ScoreLaunch | ShadowLaunch) -> int:
    """Return the cycle model's cycles for a launch."""
    shapes = []
    for index in range(launch.segments.shape[0]):
        own = Descriptor.unpack(launch.segments[index : index + 1])
        keys, output = (own.query, own.shadow) if case.scope is None else (own.shadow, own.score)
        shapes.append(SegmentShape(own.tokens, own.row_stride, keys, output))
    if case.scope is None:
        return shadow_cycles(spec, shapes, case.memory).cycles
    return score_cycles(spec, case.scope, shapes, case.memory).cycles


def differing(kernel: Kernel, run: RtlRun, launch: ScoreLaunch | ShadowLaunch, golden: Any) -> int:
    """Return the tuples (bytes of a shadow) and status beats that are not golden's."""
    width = TUPLE_BYTES if isinstance(launch, ScoreLaunch) else 1
    output = (run.result.output != golden.output).reshape(-1, width).any(axis=1).sum()
    return int(output) + int((run.result.status != golden.status).any(axis=1).sum())


def row_of(kernel: Kernel, session: RtlSession, case: Case) -> dict[str, Any]:
    """Run the launches of a case and return their row."""
    spec, memory = kernel.spec, case.memory
    names = ("tokens", "mismatches", "cycles", "beats", "code_beats", "model_cycles")
    total = dict.fromkeys(names, 0)
    other_beats = refresh = 0
    # Modelled cycles less simulated ones; launches too long and too short do not cancel out.
    off: list[int] = []
    faults: list[str] = []
    for seed in range(case.launches):
        launch = any_launch(kernel, case, seed)
        golden = (
            run_score_launch(spec, launch)
            if isinstance(launch, ScoreLaunch)
            else run_shadow_launch(spec, launch)
        )
        run = session.run(launch, replace(memory, seed=seed + 1), expected=golden.output)
        total["tokens"] += sum(case.counts)
        total["mismatches"] += differing(kernel, run, launch, golden)
        total["cycles"] += run.outcome.cycles
        total["beats"] += run.beats
        total["code_beats"] += run.code_beats
        modelled = model_cycles(spec, case, launch)
        total["model_cycles"] += modelled
        if abs(modelled - run.outcome.cycles) > max(MODEL_SHARE * run.outcome.cycles, MODEL_CYCLES):
            off.append(modelled - run.outcome.cycles)
        other_beats += run.outcome.read_beats[1] + run.outcome.write_beats
        refresh += run.outcome.refresh
        faults += check_outcome(run.outcome)
    cycles, beats = total["cycles"], total["beats"]
    # What a shared bus leaves to the key port: no refresh, no other port's beats.
    left = cycles - refresh - other_beats if memory.shared_bus else cycles
    if memory.name == IDEAL.name and beats < IDEAL_GOAL * cycles:
        faults.append(f"{beats / cycles:.4f} beats per cycle, the goal is {IDEAL_GOAL}")
    # Bursts of a short row's keys, as many as may be open, do not cover the memory's latency.
    burst = min(BURST_BEATS, row_beats(spec)) if case.layout == "rows" else BURST_BEATS
    covers = memory.outstanding * burst >= memory.read_latency[1]
    if memory.name == REALISTIC.name and covers and beats < REALISTIC_GOAL * left:
        faults.append(f"{beats / left:.4f} of what the bus leaves, the goal is {REALISTIC_GOAL}")
    if off:
        faults.append(f"the cycle model is {off} cycles off")
    return {
        "kernel": kernel.name,
        "preset": kernel.preset,
        "mode": kernel.mode.value,
        "rule": kernel.rule.value if kernel.rule else "-",
        "scope": case.scope.value if case.scope is not None else "-",
        "execution": "rtl",
        "simulator": "verilator",
        "memory": memory.name,
        "layout": case.layout,
        "launch_tokens": sum(case.counts),
        **total,
        "beats_per_cycle": round(beats / cycles, 4),
        "share_of_bus_left": round(beats / left, 4),
        "faults": faults,
    }


def adversarial_row(kernel: Kernel, session: RtlSession, scope: Scope | None) -> dict[str, Any]:
    """Run every case of the tests' table (saturation, ties, wrong descriptors) between stalls."""
    spec = kernel.spec
    count = usual_tokens(spec)
    launches = (
        {name: make(spec, count) for name, make in SHADOW_CASES.items()}
        if scope is None
        else {name: make(spec, scope, count) for name, make in SCORE_CASES.items()}
    )
    tokens = mismatches = 0
    faults = []
    for seed, (name, launch) in enumerate(launches.items()):
        golden = (run_shadow_launch if scope is None else run_score_launch)(spec, launch)
        run = session.run(launch, replace(STALLS, seed=seed), expected=golden.output)
        wrong = differing(kernel, run, launch, golden)
        tokens += golden.completed_tokens
        mismatches += wrong
        faults += [f"{name}: {fault}" for fault in check_outcome(run.outcome)]
        faults += [f"{name}: {wrong} mismatches"] if wrong else []
    return {
        "kernel": kernel.name,
        "preset": kernel.preset,
        "mode": kernel.mode.value,
        "rule": kernel.rule.value if kernel.rule else "-",
        "scope": scope.value if scope is not None else "-",
        "execution": "rtl",
        "simulator": "verilator",
        "memory": STALLS.name,
        "cases": len(launches),
        "tokens": tokens,
        "mismatches": mismatches,
        "faults": faults,
    }


@dataclass(frozen=True)
class Found:
    """What one kernel left: rows of timed launches, rows of adversarial ones, CPU seconds."""

    rows: list[dict[str, Any]]
    adversarial: list[dict[str, Any]]
    seconds: float


def run_kernel(kernel: Kernel, tokens: int) -> Found:
    """Run everything about one kernel."""
    before = cpu_seconds()
    session = RtlSession(kernel.spec, kernel.name)
    scopes = [None] if kernel.rule is None else list(Scope)
    adversarial = [adversarial_row(kernel, session, scope) for scope in scopes]
    rows = [row_of(kernel, session, case) for case in cases(kernel, tokens)]
    session.close()
    return Found(rows, adversarial, cpu_seconds() - before)


def main() -> int:
    """Run the table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--mode", nargs="+", choices=list(KeyMode), default=list(KeyMode))
    parser.add_argument("--rule", nargs="+", choices=list(Rule), default=list(Rule))
    parser.add_argument("--tokens", type=int, default=100_000, help="per scoring kernel, at least")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    add_shard(parser)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "reports" / "rtl.json")
    given = parser.parse_args()
    table = given.shard.part(list(kernels(given.preset, given.mode, given.rule)))
    rows: list[dict[str, Any]] = []
    adversarial: list[dict[str, Any]] = []
    seconds = 0.0
    scored = 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.jobs) as pool:
        for found in pool.map(run_kernel, table, [given.tokens] * len(table)):
            rows += found.rows
            adversarial += found.adversarial
            seconds += found.seconds
            for row in found.rows:
                print(_line(row), flush=True)
            for row in found.adversarial:
                print(
                    f"{row['kernel']:12} {row['preset']:14} {row['mode']:4} {row['rule']:10} "
                    f"{row['scope']:7} {row['cases']} adversarial cases, {row['tokens']} tokens, "
                    f"{row['mismatches']} mismatches {'; '.join(row['faults'])}",
                    flush=True,
                )
            # Written as it grows: a long run that is cut off leaves what it found.
            scored = sum(
                row["tokens"] for row in rows + adversarial if row["kernel"] == "score_tokens"
            )
            report = {
                "label": "RTL simulation (hand-written SystemVerilog, Verilator)",
                "cpu_minutes": round(seconds / 60, 1),
                "scored_tokens": scored,
                "rows": rows,
                "adversarial": adversarial,
            }
            given.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = sum(row["mismatches"] for row in rows + adversarial)
    faulty = sum(bool(row["faults"]) for row in rows + adversarial)
    print(
        f"rtl: {len(rows) + len(adversarial)} rows, {scored} token scores, {wrong} mismatches, "
        f"{faulty} rows with faults, {seconds / 60:.1f} CPU minutes: {given.out}"
    )
    return int(bool(wrong or faulty))


def _line(row: dict[str, Any]) -> str:
    model = row["model_cycles"] / row["cycles"] - 1
    return (
        f"{row['kernel']:12} {row['preset']:14} {row['mode']:4} {row['rule']:10} "
        f"{row['scope']:7} {row['memory']:9} {row['layout']:6} {row['tokens']:7} tokens, "
        f"{row['mismatches']} mismatches, {row['beats_per_cycle']:.4f} beats/cycle, "
        f"{row['share_of_bus_left']:.4f} of the bus left, model {model:+.2%} "
        f"{'; '.join(row['faults'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
