# SPDX-License-Identifier: Apache-2.0
"""Show that memory stays flat at M0 while a long context of random rows goes to the drive.

The rows are random, in the shape of a 3B or a 1B model; nothing here says anything about quality.
Prefill
attention over so many tokens would take days on a CPU, so rows are stored without it; the decode
steps at the end score, select, fetch and attend as any other.

With --lengths the steps are taken at each context on the way, always as many tokens selected, with
two shadow formats in turns: the same tokens with other bytes tell what bytes cost from what tokens
cost. Beside it stands how fast this machine scores and reads shadows with nothing else going on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hillinfer.drive.directories import prepared_cold_dir
from hillinfer.engine.budget_growth import ShadowChoice
from hillinfer.engine.runtime import Runtime
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.values import ByteSize, format_bytes
from hillinfer_bench.report.kinds import MachineKind
from random_rows import CHUNK, HEADS, RandomRows, model_shape
from space_lengths import (
    SLACK_BYTES,
    beside_scoring,
    decode_by_length,
    goal_records,
    growth_of,
    scorer_alone,
    seconds_per_token_alone,
)

LABEL = "measured; random rows in the shape of a {} model"
_RATES = ("scored_bytes_per_second", "read_bytes_per_second")
_MET: dict[object, str] = {True: "met", False: "not met", None: "not judged"}


def main() -> None:
    """Store rows, take decode steps, and write what memory did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        help="rising contexts: take steps at each, instead of at the end of --tokens",
    )
    parser.add_argument(
        "--shadows", nargs="+", choices=["int8", "int4", "int2"], default=["int8", "int4"],
        help="formats that --lengths takes steps with, each with --dram-budget for itself",
    )  # fmt: skip
    parser.add_argument(
        "--max-selected", type=int,
        help="tokens selected whatever the context; 1024 with --lengths",
    )  # fmt: skip
    parser.add_argument("--shape", choices=list(HEADS), default="3b")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--alpha", type=float, help="0.02; 0.5 with --lengths")
    parser.add_argument("--exact", type=float, default=1.0, help="share that comes as rows")
    parser.add_argument("--shadow", choices=["auto", "int8", "int4", "int2"], default="auto")
    parser.add_argument("--dram-budget", default="1GiB")
    parser.add_argument(
        "--scorer-mebibytes", type=int, default=128, help="of shadow that is scored alone, at least"
    )
    parser.add_argument("--cold-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.lengths:
        if sorted(set(chosen.lengths)) != chosen.lengths:
            parser.error(f"--lengths {chosen.lengths} must rise")
        chosen.tokens = chosen.lengths[-1]
        # As many of the shortest context as of the longest.
        chosen.max_selected = chosen.max_selected or 1024
    chosen.alpha = chosen.alpha or (0.5 if chosen.lengths else 0.02)
    if chosen.lengths:
        by_lengths(parser, chosen)
    else:
        at_the_end(chosen)


def at_the_end(chosen: argparse.Namespace) -> None:
    """Store all rows, take steps, and fail where memory is not flat."""
    choice = choice_of(chosen, chosen.shadow)
    if choice.warning:
        print(f"warning: {choice.warning}", file=sys.stderr)
    runtime = runtime_of(chosen, choice)
    try:
        result = fill_and_decode(runtime, chosen.tokens, chosen.steps)
    finally:
        runtime.close()
    statistics = result["statistics"]
    write(
        chosen,
        {
            "shadow": choice.settings.key_mode.value,
            "streamed_shadow_bytes": choice.plan.streamed_shadow_bytes,
            **result,
        },
    )
    print(
        f"{chosen.tokens} tokens, {format_bytes(statistics['kv_bytes'])} of rows; DRAM peak "
        f"{format_bytes(statistics['dram_peak_bytes'])} of "
        f"{format_bytes(statistics['dram_budget_bytes'])}; the process grew by "
        f"{format_bytes(result['growth_bytes'])} at most; a step took "
        f"{1e3 * result['seconds_per_step']:.1f} ms; report: {chosen.out}"
    )
    check_growth(result["growth_bytes"], statistics["dram_peak_bytes"])
    if result["late_growth_bytes"] > SLACK_BYTES:
        raise SystemExit(f"memory is not flat: {format_bytes(result['late_growth_bytes'])} late")


def by_lengths(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Take steps at each context with each format, and fit what they grow with."""
    choices = {shadow: choice_of(chosen, shadow) for shadow in dict.fromkeys(chosen.shadows)}
    for shadow, choice in choices.items():
        if streamed := choice.plan.streamed_shadow_bytes:
            # The drive's rate would be fitted for memory's.
            parser.error(
                f"--dram-budget {chosen.dram_budget}: {format_bytes(streamed)} of the {shadow} "
                "shadow would be read from the drive at every step: raise it or take fewer --layers"
            )
    least = chosen.scorer_mebibytes << 20
    alone = {shadow: scorer_alone(one.settings, least, 5) for shadow, one in choices.items()}
    with ExitStack() as closing:
        runtimes = {}
        for shadow, choice in choices.items():
            runtimes[shadow] = runtime_of(chosen, choice)
            closing.callback(runtimes[shadow].close)
        result = decode_by_length(runtimes, chosen.lengths, chosen.steps)
    growth = growth_of(result["points"])
    per_token = seconds_per_token_alone(alone)
    goals = goal_records(result["points"], growth)
    write(
        chosen,
        {
            "threads": torch.get_num_threads(),
            **result,
            "growth": {
                kind: {figure: fit and fit.as_dict() for figure, fit in fits.items()}
                for kind, fits in growth.items()
            },
            "growth_share_beside_scoring": beside_scoring(result["points"]),
            "scorer_alone": alone,
            "scorer_alone_seconds_per_token": per_token and per_token * chosen.layers,
            "goals": goals,
        },
    )
    for kind, fits in growth.items():
        if fit := fits["median"]:
            rate = fit.bytes_per_second
            print(
                f"{kind} time, medians: {1e3 * fit.fixed_seconds:.2f} ms, 1 s per "
                f"{'no end' if rate is None else f'{rate / 1e9:.2f} GB'} of shadow, "
                f"{1e9 * fit.seconds_per_token:.1f} ns per token; "
                + "; ".join(
                    f"{one.shadow}: bytes are {one.by_bytes / one.seconds:.0%} of what it grew by"
                    for one in fit.formats
                )
            )
    for kind, shares in beside_scoring(result["points"]).items():
        each = ", ".join(f"{shadow} {share:.0%}" for shadow, share in shares.items())
        print(f"{kind} time, medians: not scoring at all, of what it grew by: {each}")
    for shadow, one in alone.items():
        scored, read = (one[name]["median"] / 1e9 for name in _RATES)
        print(f"{shadow} alone: scored at {scored:.2f} GB/s, read at {read:.2f} GB/s")
    if per_token is not None:
        print(f"scoring alone: {1e9 * per_token * chosen.layers:.1f} ns per token beside its bytes")
    for goal in goals:
        flags = "; flagged" if goal["flagged"] else ""
        print(f"{goal['goal']}: {goal['reached']}: {_MET[goal['met']]}{flags}")
    print(f"report: {chosen.out}")
    counted = sum(one["dram_peak_bytes"] for one in result["statistics"].values())
    check_growth(result["growth_bytes"], counted)


def shape_of(chosen: argparse.Namespace) -> ModelShape:
    """Return the model's shape, with room for the steps."""
    most_steps = 2 * chosen.steps * len(chosen.lengths or [1])
    return model_shape(chosen.layers, chosen.tokens + most_steps, chosen.shape)


def choice_of(chosen: argparse.Namespace, shadow: str) -> ShadowChoice:
    """Return the settings and the plan of a shadow format."""
    settings = Settings().changed(
        alpha=chosen.alpha,
        exact=chosen.exact,
        max_selected=chosen.max_selected,
        shadow=shadow,
        dram_budget=ByteSize.parse(chosen.dram_budget),
    )
    shape = shape_of(chosen)
    choice = ShadowChoice.of(shape, settings, shape.max_positions)
    choice.plan.check()
    return choice


def runtime_of(chosen: argparse.Namespace, choice: ShadowChoice) -> Runtime:
    """Return a runtime with what was chosen."""
    return Runtime(
        shape_of(chosen),
        choice.settings,
        choice.plan.budget_bytes,
        prepared_cold_dir(chosen.cold_dir),
        shadow_limit_bytes=choice.limit_bytes,
    )


def write(chosen: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the report: what was chosen, then what was measured."""
    report = {
        "label": LABEL.format(chosen.shape.upper()),
        **MachineKind.here(shape_of(chosen).stored_type.value).as_record(),
        "shape": {
            "layers": chosen.layers,
            "kv_heads": shape_of(chosen).kv_heads,
            "head_dim": shape_of(chosen).head_dim,
        },
        "tokens": chosen.tokens,
        "alpha": chosen.alpha,
        "exact": chosen.exact,
        "max_selected": chosen.max_selected,
        **result,
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=2) + "\n")


def check_growth(growth_bytes: int, counted_bytes: int) -> None:
    """End the tool where the process grew beyond what is counted."""
    if growth_bytes > counted_bytes + SLACK_BYTES:
        raise SystemExit(f"memory grew beyond M0 and {format_bytes(SLACK_BYTES)}")


def fill_and_decode(runtime: Runtime, tokens: int, steps: int) -> dict[str, Any]:
    """Return memory after each part, seconds and statistics."""
    rows = RandomRows(runtime)
    after_chunks = []
    started = time.perf_counter()
    while rows.tokens < tokens:
        rows.store(min(CHUNK, tokens - rows.tokens))
        after_chunks.append(rows.growth_bytes)
    fill_seconds = time.perf_counter() - started
    after_steps = []
    started = time.perf_counter()
    for number in range(steps):
        rows.step(number)
        after_steps.append(rows.growth_bytes)
    step_seconds = time.perf_counter() - started
    statistics = runtime.statistics()
    growth = max(after_chunks + after_steps)
    return {
        "growth_bytes": growth,
        "beyond_m0_bytes": growth - statistics.dram_peak_bytes,
        # What came after half of the rows were stored.
        "late_growth_bytes": growth - max(after_chunks[: len(after_chunks) // 2 + 1]),
        "slack_bytes": SLACK_BYTES,
        "growth_after_chunks": after_chunks,
        "growth_after_steps": after_steps,
        "fill_seconds": fill_seconds,
        "seconds_per_step": step_seconds / max(1, steps),
        "statistics": asdict(statistics),
    }


if __name__ == "__main__":
    main()
