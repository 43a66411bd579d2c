# SPDX-License-Identifier: Apache-2.0
"""Score many tokens with the simulated RTL of every preset, key mode and rule; compare with golden.

Writes build/reports/rtl.json: one row per preset, key mode, rule, scope and memory. Cycles are of
the hand-written RTL in simulation: no measurement of a card.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "sw_model", "tests/hw", "tests/sw_model")]

from launch_builder import ScoreSegment, score_launch  # noqa: E402
from launch_cases import any_keys, any_query, base_of  # noqa: E402

from hillinfer_hw.memory_model import IDEAL, REALISTIC, MemoryModel  # noqa: E402
from hillinfer_hw.rtl import RtlSession, check_outcome  # noqa: E402
from hillinfer_model.choices import KeyMode, Rule, Scope  # noqa: E402
from hillinfer_model.cycle_model import score_cycles  # noqa: E402
from hillinfer_model.descriptor import Descriptor  # noqa: E402
from hillinfer_model.golden_launch import run_score_launch  # noqa: E402
from hillinfer_model.kernel_spec import KernelSpec  # noqa: E402
from hillinfer_model.launch_shape import SegmentShape  # noqa: E402
from hillinfer_model.presets import PRESETS, preset_spec  # noqa: E402
from hillinfer_model.score_launch import ScoreLaunch  # noqa: E402

# Segments of one launch: full ones, and at last one that ends in mid-group.
FULL_SEGMENTS = 12
LAST_SEGMENT = 517
TUPLE_BYTES = 4


def random_launch(spec: KernelSpec, scope: Scope, seed: int) -> ScoreLaunch:
    """Return a launch of any keys and queries a kernel may be given."""
    generator = np.random.default_rng(seed)
    counts = [spec.segment_tokens] * FULL_SEGMENTS + [LAST_SEGMENT]
    segments = [
        ScoreSegment(
            base_of(spec, index),
            any_keys(spec, generator, count),
            any_query(spec, generator, 2**12, -40, 0),
        )
        for index, count in enumerate(counts)
    ]
    return score_launch(spec, scope, segments, seed)


def model_cycles(spec: KernelSpec, scope: Scope, launch: ScoreLaunch, memory: MemoryModel) -> int:
    """Return the cycle model's cycles for a launch."""
    shapes = []
    for index in range(launch.segments.shape[0]):
        own = Descriptor.unpack(launch.segments[index : index + 1])
        shapes.append(SegmentShape(own.tokens, own.row_stride, own.shadow, own.score))
    return score_cycles(spec, scope, shapes, memory).cycles


def rows_of(preset: str, mode: KeyMode, rule: Rule, tokens: int) -> list[dict[str, Any]]:
    """Return the rows of one kernel; the first scores at least `tokens`, the others one launch."""
    spec = preset_spec(preset, mode, rule)
    session = RtlSession(spec, "score_tokens")
    rows = []
    per_launch = FULL_SEGMENTS * spec.segment_tokens + LAST_SEGMENT
    for scope, memory in (
        (Scope.LAYER, IDEAL),
        (Scope.LAYER, REALISTIC),
        (Scope.KV_HEAD, IDEAL),
        (Scope.KV_HEAD, REALISTIC),
    ):
        launches = -(-tokens // per_launch) if (scope, memory) == (Scope.LAYER, IDEAL) else 1
        total = {"tokens": 0, "mismatches": 0, "cycles": 0, "beats": 0, "code_beats": 0}
        total |= {"other_beats": 0, "refresh": 0, "model_cycles": 0}
        faults: list[str] = []
        for seed in range(launches):
            launch = random_launch(spec, scope, seed)
            golden = run_score_launch(spec, launch)
            run = session.run(launch, replace(memory, seed=seed + 1), expected=golden.output)
            differing = run.result.output != golden.output
            total["tokens"] += per_launch
            total["mismatches"] += int(differing.reshape(-1, TUPLE_BYTES).any(axis=1).sum())
            total["mismatches"] += int((run.result.status != golden.status).any(axis=1).sum())
            total["cycles"] += run.outcome.cycles
            total["beats"] += run.beats
            total["code_beats"] += run.code_beats
            total["other_beats"] += run.outcome.read_beats[1] + run.outcome.write_beats
            total["refresh"] += run.outcome.refresh
            total["model_cycles"] += model_cycles(spec, scope, launch, memory)
            faults += check_outcome(run.outcome)
        # What a shared bus leaves to the key port: no refresh, no other port's beats.
        left = total["cycles"]
        if memory.shared_bus:
            left -= total["refresh"] + total["other_beats"]
        rows.append(
            {
                "preset": preset,
                "mode": mode.value,
                "rule": rule.value,
                "scope": scope.value,
                "execution": "rtl",
                "simulator": "verilator",
                "memory": memory.name,
                **total,
                "beats_per_cycle": round(total["beats"] / total["cycles"], 4),
                "share_of_bus_left": round(total["beats"] / left, 4),
                "faults": faults,
            }
        )
    session.close()
    return rows


def main() -> int:
    """Run the table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", action="append", choices=list(PRESETS))
    parser.add_argument("--mode", action="append", choices=[mode.value for mode in KeyMode])
    parser.add_argument("--rule", action="append", choices=[rule.value for rule in Rule])
    parser.add_argument("--tokens", type=int, default=160_000, help="per kernel, at least")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "reports" / "rtl.json")
    given = parser.parse_args()
    kernels = [
        (preset, KeyMode(mode), Rule(rule), given.tokens)
        for preset in given.preset or PRESETS
        for mode in given.mode or KeyMode
        for rule in given.rule or Rule
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(given.jobs) as pool:
        for found in pool.map(rows_of, *zip(*kernels, strict=True)):
            for row in found:
                rows.append(row)
                print(
                    f"{row['preset']:14} {row['mode']:4} {row['rule']:10} {row['scope']:7} "
                    f"{row['memory']:9} {row['tokens']:7} tokens, {row['mismatches']} mismatches, "
                    f"{row['beats_per_cycle']:.4f} beats/cycle, {row['share_of_bus_left']:.4f} of "
                    f"the bus left, model {row['model_cycles'] / row['cycles'] - 1:+.2%} "
                    f"{'; '.join(row['faults'])}",
                    flush=True,
                )
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes = (own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime) / 60
    total = sum(row["tokens"] for row in rows)
    print(f"{total} tokens, {minutes:.1f} CPU minutes")
    report = {"rows": rows, "tokens": total, "cpu_minutes": round(minutes, 1)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row["mismatches"] or row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
