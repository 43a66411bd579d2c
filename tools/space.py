# SPDX-License-Identifier: Apache-2.0
"""Show that memory stays flat at M0 while a long context of random rows goes to the drive.

The rows are random, in the shape of a 3B model; nothing here says anything about quality. Prefill
attention over so many tokens would take days on a CPU, so rows are stored without it; the decode
steps at the end score, select, fetch and attend as any other.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hillinfer.byte_size import ByteSize, format_bytes
from hillinfer.cold_dir import prepared_cold_dir
from hillinfer.machine.processor import ProcessorFacts
from hillinfer.model_shape import ModelShape, StoredType
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
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--alpha", type=float, default=0.02)
    parser.add_argument("--dram-budget", default="1GiB")
    parser.add_argument("--cold-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()

    shape = ModelShape(
        layers=chosen.layers,
        kv_heads=KV_HEADS,
        query_heads=QUERY_HEADS,
        head_dim=HEAD_DIM,
        stored_type=StoredType.BFLOAT16,
        max_positions=chosen.tokens + chosen.steps,
    )
    settings = Settings().changed(
        alpha=chosen.alpha, shadow="auto", dram_budget=ByteSize.parse(chosen.dram_budget)
    )
    choice = ShadowChoice.of(shape, settings, chosen.tokens + chosen.steps)
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
        result = fill_and_decode(runtime, chosen.tokens, chosen.steps)
    finally:
        runtime.close()
    report = {
        "label": "measured; random rows in the shape of a 3B model",
        "processor": ProcessorFacts.read().name,
        "shape": {"layers": shape.layers, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM},
        "tokens": chosen.tokens,
        "alpha": chosen.alpha,
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
    if result["growth_bytes"] > statistics["dram_peak_bytes"] + SLACK_BYTES:
        raise SystemExit(f"memory grew beyond M0 and {format_bytes(SLACK_BYTES)}")
    if result["late_growth_bytes"] > SLACK_BYTES:
        raise SystemExit(f"memory is not flat: {format_bytes(result['late_growth_bytes'])} late")


def fill_and_decode(runtime: Runtime, tokens: int, steps: int) -> dict[str, Any]:
    """Return memory after each part, seconds and statistics."""
    shape = runtime.shape
    generator = torch.Generator().manual_seed(0)
    # Every chunk draws from the same numbers, turned by its own amount, so that drawing them is
    # not what takes the time.
    pool = torch.randn(2, KV_HEADS, 2 * CHUNK, HEAD_DIM, generator=generator).bfloat16()
    query = torch.randn(QUERY_HEADS, 1, HEAD_DIM, generator=generator)
    sequence = runtime.open_sequence()
    before = resident_bytes()
    after_chunks = []
    started = time.perf_counter()
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        runtime.begin_step()
        for layer in range(shape.layers):
            turn = (start // CHUNK * 37 + layer * 101) % CHUNK
            keys, values = pool[:, :, turn : turn + count]
            runtime.append(layer, sequence, keys, values)
            runtime.code_full_segments(layer, sequence, keys)
        sequence.token_ids.extend([0] * count)
        after_chunks.append(resident_bytes() - before)
        if sys.stderr.isatty():
            print(f"\r{start + count} of {tokens} tokens", end="", file=sys.stderr)
    fill_seconds = time.perf_counter() - started
    after_steps = []
    started = time.perf_counter()
    for step in range(steps):
        runtime.begin_step()
        for layer in range(shape.layers):
            keys, values = pool[:, :, step : step + 1]
            runtime.append(layer, sequence, keys, values)
            runtime.attend_selected(layer, sequence, query, keys, HEAD_DIM**-0.5)
        sequence.token_ids.append(0)
        after_steps.append(resident_bytes() - before)
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
