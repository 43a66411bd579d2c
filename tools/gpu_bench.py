# SPDX-License-Identifier: Apache-2.0
"""Measures decode on a CUDA GPU beside the full cache in GPU memory, and what overlap saves.

python tools/gpu_bench.py --shape llama-3.1-8b --layers 8 --tokens 16384 --exact 1 0.02

The model has random weights and is on the GPU; rows and scoring are on the host. Every round
decodes a few tokens with each contender: transformers' own cache, which lies in GPU memory, and
HillInfer with predicted queries, with true ones, and with predicted ones whose copies wait for
everything (`plain`). With `--exact` below 1 other selected tokens come as codes. Random weights
select at random: hot pools find fewer rows than with a real model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from hillinfer.drive.directories import prepared_cold_dir
from hillinfer.gpu.staging import CudaLane
from hillinfer.hf.attach import Attachment
from hillinfer.settings import Settings
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.systems.shapes import SHAPES

CHUNK, WARM_TOKENS = 1024, 4
_PREDICTED, _TRUE, _PLAIN = _WAYS = ("predicted", "true", "plain")
_FULL = "full cache in GPU memory"


class PlainLane(CudaLane):
    """Copies that wait for everything before them and are waited for: nothing overlaps."""

    def to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy, with the GPU idle before and behind."""
        torch.cuda.synchronize()
        copy = super().to_gpu(target, source)
        torch.cuda.synchronize()
        return copy

    def from_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy, with the GPU idle before and behind."""
        torch.cuda.synchronize()
        copy = super().from_gpu(target, source)
        torch.cuda.synchronize()
        return copy


@torch.no_grad()
def read(model: Any, cache: Any, ids: torch.Tensor) -> float:
    """Read a prompt by chunks; return the seconds."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for start in range(0, ids.shape[1], CHUNK):
        model(ids[:, start : start + CHUNK], past_key_values=cache, logits_to_keep=1)
    torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.no_grad()
def decode(model: Any, cache: Any, new_tokens: int) -> float:
    """Decode tokens; return the seconds of one."""
    token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(new_tokens):
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / new_tokens


def measure(
    model: Any, ids: torch.Tensor, settings: Settings, lane: type[CudaLane] | None, chosen: Any
) -> dict[str, Any]:
    """Return the figures of HillInfer with these settings and this lane."""
    given = {} if lane is None else {"make_lane": lambda devices: lane(*devices)}
    with Attachment(model, settings, **given) as hill:
        cache = hill.new_cache(expected_tokens=ids.shape[1] + 256)
        prefill = read(model, cache, ids)
        decode(model, cache, WARM_TOKENS)
        before = cache.statistics()
        steps = [decode(model, cache, chosen.new_tokens) for _ in range(chosen.rounds)]
        after = cache.statistics()
        cache.close()
    decoded = chosen.new_tokens * chosen.rounds
    return {
        "prefill_seconds": prefill,
        "step_seconds": steps,
        "to_gpu_bytes": (after.host_to_device_bytes - before.host_to_device_bytes) / decoded,
        "drive_bytes": (after.cold_read_bytes - before.cold_read_bytes) / decoded,
        "staging": after.gpu_staging,
        "dram_peak_bytes": after.dram_peak_bytes,
    }


def told(name: str, row: dict[str, Any]) -> None:
    """Say a contender's line once it was measured, and put median and spread into its row."""
    steps = row["step_seconds"]
    row["median_seconds"] = statistics.median(steps)
    row["spread"] = max(steps) / min(steps)
    print(
        f"{name:38s} {row['median_seconds'] * 1e3:8.2f} ms a token (spread {row['spread']:.2f}), "
        f"prefill {row['prefill_seconds']:.2f} s, to the GPU "
        f"{row.get('to_gpu_bytes', 0) / 2**20:.1f} MiB, from the drive "
        f"{row.get('drive_bytes', 0) / 2**20:.1f} MiB, {row.get('staging', '')}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a line for each contender, and write a report.

    `arguments` are those of the command line; None takes the process' own.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/gpu.json"))
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument(
        "--exact",
        type=float,
        nargs="+",
        default=[1.0],
        help="shares of exact tokens; below 1 the others come as codes",
    )
    parser.add_argument(
        "--alpha", type=float, help="by default 0.1 where all are exact, and 0.2 with codes"
    )
    parser.add_argument("--ways", nargs="+", default=list(_WAYS), choices=_WAYS)
    parser.add_argument("--budgets", nargs="+", default=["120%", "25%"])
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-dir", type=Path)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU: run on a machine with one, with torch built for CUDA")
    # cuDNN plans attention anew for each length, which takes 8 ms a layer and step (measured).
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    shape = replace(SHAPES[chosen.shape], layers=chosen.layers)
    model = shape.build(chosen.tokens + 1024, torch.bfloat16).cuda()
    ids = torch.randint(256, (1, chosen.tokens), device="cuda")
    token_bytes = shape.kv_shape(chosen.tokens, torch.bfloat16).token_bytes

    rows: dict[str, dict[str, Any]] = {}
    full = DynamicCache(config=model.config)
    prefill = read(model, full, ids)
    decode(model, full, WARM_TOKENS)
    steps = [decode(model, full, chosen.new_tokens) for _ in range(chosen.rounds)]
    rows[_FULL] = {"prefill_seconds": prefill, "step_seconds": steps}
    told(_FULL, rows[_FULL])
    del full
    common = partial(
        Settings().changed,
        cold_dir=prepared_cold_dir(chosen.cold_dir),
        alpha=chosen.alpha,
    )
    for exact, budget in itertools.product(chosen.exact, chosen.budgets):
        size = f"{int(float(budget.rstrip('%')) / 100 * token_bytes * chosen.tokens) >> 20}MiB"
        for way in chosen.ways:
            query = "true" if way == _TRUE else "predicted"
            settings = common(dram_budget=size, query=query, exact=exact)
            lane = PlainLane if way == _PLAIN else None
            name = f"{budget}, exact {exact:g}: {way}"
            rows[name] = measure(model, ids, settings, lane, chosen)
            rows[name]["alpha"] = settings.importance_rate
            told(name, rows[name])
    record = {
        "label": "measured",
        **MachineKind.here(torch.bfloat16).as_record(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": chosen.shape,
        "layers": chosen.layers,
        "tokens": chosen.tokens,
        "kv_bytes": token_bytes * chosen.tokens,
        "rows": rows,
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
