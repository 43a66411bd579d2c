# SPDX-License-Identifier: Apache-2.0
"""Measures decode steps at rising contexts with several shadow formats, and what they grow with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.engine.runtime import Runtime
from hillinfer.scoring.native import NativeScorer
from hillinfer.settings import Settings
from hillinfer.values import format_bytes
from hillinfer_bench.report.rows import Timing
from hillinfer_model.kernel_spec import KernelSpec
from random_rows import CHUNK, RandomRows, model_shape
from scorer_bench import SCALING, any_query, measure_beside_reads, shadows
from step_growth import StepGrowth, StepPoint

# What comes on top of M0: rows of the chunk at hand, torch's scratch, lists of token ids.
SLACK_BYTES = 64 << 20
# As much as the other goals' "within 10 %". Less could hardly be told from noise: rows are flagged
# from twice as much spread on.
UNEXPLAINED_SHARE = 0.1
# The contexts that the goal speaks of, within the tokens that warming up adds.
GOAL_CONTEXTS = (4096, 262_144)
TIMES = {"wall": "seconds_per_step", "CPU": "cpu_seconds_per_step"}
SCORING = {"wall": "scoring_seconds", "CPU": "scoring_cpu_seconds"}
_FIGURES = ("minimum", "median")


def scorer_alone(settings: Settings, least_bytes: int, rounds: int) -> dict[str, Any]:
    """Return how fast shadows are scored and read with nothing else going on.

    Parameters
    ----------
    settings
        Name the format.
    least_bytes
        Of shadows, better more than caches hold.
    rounds
        Of which the fastest and the median are returned, bytes per second.
    """
    spec = kernel_spec(model_shape(1, CHUNK), settings)
    memory, segments = shadows(spec, least_bytes)
    native = NativeScorer(spec, settings.scope)
    query = any_query(spec)
    calls = {"native": lambda: native.tuples(query, SCALING, segments)}
    taken = measure_beside_reads(memory, calls, rounds)
    rates = {name: Timing.of(own) for name, own in taken.items()}
    return {
        "bytes": memory.nbytes,
        "layer_bytes_per_token": token_bytes(spec),
        **{
            name: {
                "fastest": 1e3 * memory.nbytes / rates[call].minimum,
                "median": 1e3 * memory.nbytes / rates[call].median,
                "flagged": rates[call].flagged,
            }
            for name, call in (
                ("read_bytes_per_second", "read"),
                ("scored_bytes_per_second", "native"),
            )
        },
    }


def token_bytes(spec: KernelSpec) -> float:
    """Return the shadow's bytes of a token in one layer."""
    return spec.segment_bytes / spec.segment_tokens


def seconds_per_token_alone(alone: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return what scoring alone takes per token and layer whatever its bytes; None for one format.

    Of the formats of the most and the fewest bytes: what their times per token leave where there
    are no bytes.
    """
    # Bytes and seconds of a token.
    pairs = sorted(
        (one["layer_bytes_per_token"], one["layer_bytes_per_token"] / rate)
        for one in alone.values()
        for rate in [one["scored_bytes_per_second"]["median"]]
    )
    (few, less), (many, more) = pairs[0], pairs[-1]
    return less - few * (more - less) / (many - few) if many > few else None


def decode_by_length(
    runtimes: Mapping[str, Runtime], lengths: Sequence[int], steps: int
) -> dict[str, Any]:
    """Return how decode steps and memory grow with the context.

    Steps of the formats are taken in turns, so that what else the machine does falls on all. After
    each the same shadow is scored once more with nothing else of a step.

    Parameters
    ----------
    runtimes
        By name of the shadow format; each selects a fixed number of tokens.
    lengths
        Rising contexts at which steps are taken.
    steps
        So many are counted at each, after as many that are not.
    """
    rows = {shadow: RandomRows(runtime) for shadow, runtime in runtimes.items()}
    # What the rows of all formats are drawn from is there by then.
    last = list(rows.values())[-1]
    points: list[dict[str, Any]] = []
    for length in lengths:
        for own in rows.values():
            while own.tokens < length:
                own.store(min(CHUNK, length - own.tokens))
        taken: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in rows}
        before = {}
        for number in range(2 * steps):
            for shadow, own in rows.items():
                counters = own.runtime.counters
                before[shadow] = counters.cold_rows_read, counters.selected_tokens
                step = partial(own.step, number)
                both = (*_seconds_of(step), *_seconds_of(own.score))
                if number >= steps:
                    taken[shadow].append(both)
        # Of all formats together: the process holds them all.
        growth = last.growth_bytes
        counted = {shadow: own.runtime.statistics() for shadow, own in rows.items()}
        beyond = growth - sum(one.dram_peak_bytes for one in counted.values())
        for shadow, own in rows.items():
            runtime = own.runtime
            spec = kernel_spec(runtime.shape, runtime.settings)
            names = (*TIMES.values(), *SCORING.values())
            columns = zip(names, zip(*taken[shadow], strict=True), strict=True)
            cold, selected = before[shadow]
            point = {
                "shadow": shadow,
                "tokens": own.tokens,
                "shadow_bytes": round(own.tokens * runtime.shape.layers * token_bytes(spec)),
                **{name: _seconds(Timing.of(seconds)) for name, seconds in columns},
                "selected_tokens_of_last_step": runtime.counters.selected_tokens - selected,
                "cold_rows_of_last_step": runtime.counters.cold_rows_read - cold,
                "dram_budget_bytes": counted[shadow].dram_budget_bytes,
                "dram_peak_bytes": counted[shadow].dram_peak_bytes,
                "growth_bytes": growth,
                "beyond_m0_bytes": beyond,
                "beyond_m0_named": _named(beyond, list(rows.values())),
            }
            points.append(point)
            print(_line(point), flush=True)
    return {
        "points": points,
        "growth_bytes": max(point["growth_bytes"] for point in points),
        "statistics": {shadow: asdict(own.runtime.statistics()) for shadow, own in rows.items()},
    }


def growth_of(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, StepGrowth | None]]:
    """Return the fits of wall and CPU time, of minimum and median."""
    return {
        kind: {
            figure: StepGrowth.of(
                [
                    StepPoint(
                        point["shadow"], point["tokens"], point["shadow_bytes"], point[name][figure]
                    )
                    for point in points
                ]
            )
            for figure in _FIGURES
        }
        for kind, name in TIMES.items()
    }


def beside_scoring(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the share of a step's growth that is not scoring at all, by kind of time and format.

    Of medians, from the shortest to the longest context. The rest of what bytes do not explain is
    arithmetic of scoring, of which a token has as much with fewer bytes.
    """
    found: dict[str, dict[str, float]] = {}
    for kind, name in TIMES.items():
        for shadow in dict.fromkeys(point["shadow"] for point in points):
            own = [point for point in points if point["shadow"] == shadow]
            first = min(own, key=lambda point: int(point["tokens"]))
            last = max(own, key=lambda point: int(point["tokens"]))
            grown, scored = (
                last[which]["median"] - first[which]["median"] for which in (name, SCORING[kind])
            )
            if grown > 0:
                found.setdefault(kind, {})[shadow] = 1 - scored / grown
    return found


def goal_records(
    points: Sequence[Mapping[str, Any]], growth: Mapping[str, Mapping[str, StepGrowth | None]]
) -> list[dict[str, object]]:
    """Return the goals beside what was reached, for the report.

    A goal is not met in times that are `flagged`, and none is judged where contexts do not reach
    as far as it speaks of or the number of selected rows is not the same everywhere.
    """
    tokens = [point["tokens"] for point in points]
    # What warms up at the first context comes on top of it.
    reach = min(tokens) < 2 * GOAL_CONTEXTS[0] and max(tokens) >= GOAL_CONTEXTS[1]
    fixed = len({point["selected_tokens_of_last_step"] for point in points}) == 1
    records = []
    for kind, name in TIMES.items():
        fit = growth[kind]["median"]
        record = _record(
            f"{kind} time of a step from {GOAL_CONTEXTS[0]} to {GOAL_CONTEXTS[1]} tokens: at most "
            f"{UNEXPLAINED_SHARE:.0%} of its growth is not bytes of shadow"
        )
        records.append(record)
        if fit is None:
            continue
        share = fit.worst.unexplained_share
        flagged = any(point[name]["flagged"] for point in points)
        met = share <= UNEXPLAINED_SHARE and not flagged
        record |= {"reached": round(share, 3), "row": fit.worst.shadow, "flagged": flagged}
        record["met"] = met if reach and fixed else None
    highest = max(points, key=lambda point: point["dram_peak_bytes"] / point["dram_budget_bytes"])
    share = highest["dram_peak_bytes"] / highest["dram_budget_bytes"]
    records.append(
        _record("what is counted at every context: at most M0")
        | {
            "reached": round(share, 3),
            "row": f"{highest['shadow']} at {highest['tokens']} tokens",
            "met": share <= 1 if reach else None,
            "flagged": False,
        }
    )
    largest = max(points, key=lambda point: int(point["beyond_m0_bytes"]))
    records.append(
        _record(
            "MiB by which the process grew beyond what is counted at every context: at most "
            f"{SLACK_BYTES >> 20}, by name in `beyond_m0_named`"
        )
        | {
            "reached": round(largest["beyond_m0_bytes"] / (1 << 20), 1),
            "row": f"all formats at {largest['tokens']} tokens",
            "met": largest["beyond_m0_bytes"] <= SLACK_BYTES if reach else None,
            "flagged": False,
        }
    )
    return records


def _record(goal: str) -> dict[str, object]:
    return {"goal": goal, **dict.fromkeys(("reached", "row", "met", "flagged"))}


def _seconds(timing: Timing) -> dict[str, float | bool]:
    return {
        "minimum": timing.minimum / 1e3,
        "median": timing.median / 1e3,
        "spread": timing.spread,
        "flagged": timing.flagged,
    }


def _seconds_of(call: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _named(beyond: int, rows: Sequence[RandomRows]) -> dict[str, int]:
    """Return what the process holds beyond M0, as far as there is a name for it."""
    # Keys and values of a chunk, 2 bytes a number.
    named = {
        "token_ids": sum(4 * own.tokens for own in rows),
        "chunk_at_hand": CHUNK * model_shape(1, CHUNK).row_bytes,
    }
    # Below nothing: buffers that are counted whole and have not been touched yet.
    return {**named, "other": beyond - sum(named.values())}


def _line(point: Mapping[str, Any]) -> str:
    wall, cpu = (point[name] for name in TIMES.values())
    flags = "  flagged" if wall["flagged"] or cpu["flagged"] else ""
    return (
        f"{point['tokens']:>8} tokens  {point['shadow']} "
        f"{format_bytes(point['shadow_bytes']):>10}  "
        f"step {1e3 * wall['minimum']:8.2f} ms ({1e3 * wall['median']:.2f})  "
        f"CPU {1e3 * cpu['minimum']:8.2f} ms ({1e3 * cpu['median']:.2f})  counted "
        f"{format_bytes(point['dram_peak_bytes'])} of {format_bytes(point['dram_budget_bytes'])}, "
        f"process grown by {format_bytes(point['growth_bytes'])}{flags}"
    )
