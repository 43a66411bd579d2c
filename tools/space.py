# SPDX-License-Identifier: Apache-2.0
"""Show that memory stays flat at M0 while a long context of random rows goes to the drive.

The rows are random, in the shape of a 3B model; nothing here says anything about quality. Prefill
attention over so many tokens would take days on a CPU, so rows are stored without it; the decode
steps at the end score, select, fetch and attend as any other. With --lengths and --max-selected
the steps are taken at each context on the way, to show what their time and memory grow with.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from hillinfer.byte_size import ByteSize, format_bytes
from hillinfer.cold_dir import prepared_cold_dir
from hillinfer.machine.processor import ProcessorFacts
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.pools.budget_plan import kernel_spec
from hillinfer.pools.shadow_choice import ShadowChoice
from hillinfer.runtime import Runtime
from hillinfer.settings import Settings

CHUNK = 1024
# What comes on top of M0: rows of the chunk at hand, torch's scratch, lists of token ids.
SLACK_BYTES = 64 << 20
# Llama-3.2-3B: 28 layers, 24 query heads, 8 KV heads of 128 channels.
KV_HEADS, QUERY_HEADS, HEAD_DIM = 8, 24, 128


def resident_bytes() -> int:
    """Return what this process holds in memory now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no RssAnon: this needs Linux")


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
    parser.add_argument("--max-selected", type=int, help="tokens selected whatever the context")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--alpha", type=float, default=0.02)
    parser.add_argument("--dram-budget", default="1GiB")
    parser.add_argument("--cold-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.lengths:
        if sorted(set(chosen.lengths)) != chosen.lengths:
            parser.error(f"--lengths {chosen.lengths} must rise")
        chosen.tokens = chosen.lengths[-1]
    most_steps = 2 * chosen.steps * len(chosen.lengths or [1])

    shape = ModelShape(
        layers=chosen.layers,
        kv_heads=KV_HEADS,
        query_heads=QUERY_HEADS,
        head_dim=HEAD_DIM,
        stored_type=StoredType.BFLOAT16,
        max_positions=chosen.tokens + most_steps,
    )
    settings = Settings().changed(
        alpha=chosen.alpha,
        max_selected=chosen.max_selected,
        shadow="auto",
        dram_budget=ByteSize.parse(chosen.dram_budget),
    )
    choice = ShadowChoice.of(shape, settings, chosen.tokens + most_steps)
    choice.plan.check()
    if choice.warning:
        print(f"warning: {choice.warning}", file=sys.stderr)
    runtime = Runtime(
        shape,
        choice.settings,
        choice.plan.budget_bytes,
        prepared_cold_dir(chosen.cold_dir),
        shadow_limit_bytes=choice.limit_bytes,
    )
    try:
        if chosen.lengths:
            spec = kernel_spec(shape, choice.settings)
            token_bytes = shape.layers * spec.segment_bytes / spec.segment_tokens
            result = decode_by_length(runtime, chosen.lengths, chosen.steps, token_bytes)
        else:
            result = fill_and_decode(runtime, chosen.tokens, chosen.steps)
    finally:
        runtime.close()
    report = {
        "label": "measured; random rows in the shape of a 3B model",
        "processor": ProcessorFacts.read().name,
        "shape": {"layers": shape.layers, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM},
        "tokens": chosen.tokens,
        "alpha": chosen.alpha,
        "max_selected": chosen.max_selected,
        "shadow": choice.settings.key_mode.value,
        "streamed_shadow_bytes": choice.plan.streamed_shadow_bytes,
        **result,
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=2) + "\n")
    statistics = result["statistics"]
    print(
        f"{chosen.tokens} tokens, {format_bytes(statistics['kv_bytes'])} of rows; DRAM peak "
        f"{format_bytes(statistics['dram_peak_bytes'])} of "
        f"{format_bytes(statistics['dram_budget_bytes'])}; the process grew by "
        f"{format_bytes(result['growth_bytes'])} at most; report: {chosen.out}"
    )
    if "fixed_seconds" in result:
        print(
            f"a step takes {1e3 * result['fixed_seconds']:.2f} ms of CPU time and 1 s per "
            f"{result['shadow_bytes_per_second'] / 1e9:.2f} GB of shadow; at most "
            f"{result['largest_unexplained_share']:.0%} of a step is neither"
        )
    if result["growth_bytes"] > statistics["dram_peak_bytes"] + SLACK_BYTES:
        raise SystemExit(f"memory grew beyond M0 and {format_bytes(SLACK_BYTES)}")
    late = result.get("late_growth_bytes", 0)
    if late > SLACK_BYTES:
        raise SystemExit(f"memory is not flat: {format_bytes(late)} late")


class RandomRows:
    """A sequence of random rows that grows by chunks and by decode steps.

    Parameters
    ----------
    runtime
        Where they go.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        generator = torch.Generator().manual_seed(0)
        # Every chunk draws from the same numbers, turned by its own amount, so that drawing them
        # is not what takes the time.
        self._pool = torch.randn(2, KV_HEADS, 2 * CHUNK, HEAD_DIM, generator=generator).bfloat16()
        # The same at every step: after the first, what is selected is hot.
        self._query = torch.randn(QUERY_HEADS, 1, HEAD_DIM, generator=generator)
        self._sequence = runtime.open_sequence()
        self._started_with = resident_bytes()

    @property
    def tokens(self) -> int:
        """Tokens stored so far."""
        return self._sequence.lengths[0]

    @property
    def growth_bytes(self) -> int:
        """By how much the process grew since the sequence was opened."""
        return resident_bytes() - self._started_with

    def store(self, count: int) -> None:
        """Store a chunk of at most 1,024 tokens in every layer."""
        start = self.tokens
        self.runtime.begin_step()
        for layer in range(self.runtime.shape.layers):
            turn = (start // CHUNK * 37 + layer * 101) % CHUNK
            keys, values = self._pool[:, :, turn : turn + count]
            self.runtime.append(layer, self._sequence, keys, values)
            self.runtime.code_full_segments(layer, self._sequence, keys)
        self._sequence.token_ids.extend([0] * count)
        if sys.stderr.isatty():
            print(f"\r{start + count} tokens", end="", file=sys.stderr)

    def step(self, number: int) -> None:
        """Take a decode step; the steps of different numbers bring different tokens."""
        self.runtime.begin_step()
        for layer in range(self.runtime.shape.layers):
            keys, values = self._pool[:, :, number : number + 1]
            self.runtime.append(layer, self._sequence, keys, values)
            self.runtime.attend_selected(layer, self._sequence, self._query, keys, HEAD_DIM**-0.5)
        self._sequence.token_ids.append(0)


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


def decode_by_length(
    runtime: Runtime, lengths: list[int], steps: int, token_shadow_bytes: float
) -> dict[str, Any]:
    """Return how decode steps and memory grow with the context.

    Parameters
    ----------
    runtime
        Selects a fixed number of tokens.
    lengths
        Rising contexts at which steps are taken.
    steps
        So many are counted at each, after as many that are not.
    token_shadow_bytes
        Shadow of one token in all layers.
    """
    rows = RandomRows(runtime)
    points = []
    for length in lengths:
        while rows.tokens < length:
            rows.store(min(CHUNK, length - rows.tokens))
        seconds, cpu_seconds = [], []
        for number in range(2 * steps):
            before = runtime.counters.cold_rows_read
            wall, cpu = time.perf_counter(), time.process_time()
            rows.step(number)
            if number >= steps:
                seconds.append(time.perf_counter() - wall)
                cpu_seconds.append(time.process_time() - cpu)
        statistics = runtime.statistics()
        points.append(
            {
                "tokens": rows.tokens,
                "shadow_bytes": round(rows.tokens * token_shadow_bytes),
                "seconds_per_step": min(seconds),
                "median_seconds_per_step": median(seconds),
                "cpu_seconds_per_step": min(cpu_seconds),
                "cold_rows_of_last_step": runtime.counters.cold_rows_read - before,
                "growth_bytes": rows.growth_bytes,
                "beyond_m0_bytes": rows.growth_bytes - statistics.dram_peak_bytes,
                "token_id_bytes": 4 * rows.tokens,
            }
        )
        print(
            f"{rows.tokens:>8} tokens  shadow {format_bytes(points[-1]['shadow_bytes']):>10}  "
            f"step {1e3 * min(seconds):8.2f} ms  CPU {1e3 * min(cpu_seconds):8.2f} ms  grown by "
            f"{format_bytes(rows.growth_bytes)}, M0 {format_bytes(statistics.dram_peak_bytes)}",
            flush=True,
        )
    return {
        "points": points,
        **line_through(points),
        "growth_bytes": max(point["growth_bytes"] for point in points),
        "statistics": asdict(runtime.statistics()),
    }


def line_through(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit CPU time per step as a fixed part and a part per byte of shadow.

    Parameters
    ----------
    points
        `shadow_bytes` and `cpu_seconds_per_step` at each context.

    Returns
    -------
    The two parts, and the largest share of a step that the line does not explain: near 0 where
    time grows with the shadow's bytes and nothing else.
    """
    if len(points) < 2:
        return {}
    sizes = np.array([point["shadow_bytes"] for point in points], np.float64)
    seconds = np.array([point["cpu_seconds_per_step"] for point in points])
    per_byte, fixed = np.polyfit(sizes, seconds, 1)
    unexplained = np.abs(seconds - fixed - per_byte * sizes) / seconds
    return {
        "fixed_seconds": float(fixed),
        "shadow_bytes_per_second": float(1 / per_byte),
        "largest_unexplained_share": float(unexplained.max()),
    }


if __name__ == "__main__":
    main()
