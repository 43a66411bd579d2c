# SPDX-License-Identifier: Apache-2.0
"""Measures how fast a token attends to scattered rows, beside how fast this machine reads them.

python tools/attention_bench.py --out build/reports/attention.json

Rows lie anywhere in a memory twenty times their size, and every call gets others, so that no
cache has them. Every round reads rows, attends to rows natively, and does it as torch must: copies
rows into a buffer, block by block, and calls torch's attention on each. What else the machine does
falls on all of them. Reported are the fastest and the median round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.kernels import SoftmaxMerge
from hillinfer.drive.files import aligned_buffer
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.library import native_library
from hillinfer.native.structures import row_addresses
from hillinfer.system.machine import ProcessorFacts
from hillinfer_bench.native_reads import read_rows
from hillinfer_bench.precision.in_place_attention import InPlaceAttention
from scorer_bench import Figures, measure

# KV heads, query heads per KV head, head_dim.
SHAPES = {
    "llama-3.2-3b": (8, 3, 128),
    "llama-3.1-8b": (8, 4, 128),
    "smollm2-135m": (3, 3, 64),
    "llama-13b": (40, 1, 128),
}
_SPREAD = 20
# As the runtime gathers them.
_BLOCK_ROWS = 512


def memory_of(shape: ModelShape, rows: int) -> NDArray[np.uint8]:
    """Return rows of random keys and values, which repeat."""
    memory = aligned_buffer(rows * shape.row_bytes)[: rows * shape.row_bytes]
    memory = memory.reshape(rows, shape.row_bytes)
    kind = RowLayout(shape).stored_type
    some = torch.randn(min(rows, 1009), shape.row_bytes // 2).to(kind).view(torch.uint8).numpy()
    for start in range(0, rows, len(some)):
        memory[start : start + len(some)] = some[: rows - start]
    return memory


def places(rows: int, count: int) -> Iterator[NDArray[np.int64]]:
    """Yield ascending positions, no row again before all others had their turn."""
    order = np.random.default_rng(0).permutation(rows)
    while True:
        for start in range(0, rows - count + 1, count):
            yield np.sort(order[start : start + count])


def gathered(
    layout: RowLayout,
    memory: NDArray[np.uint8],
    buffer: NDArray[np.uint8],
    query: torch.Tensor,
    scaling: float,
    positions: NDArray[np.int64],
) -> torch.Tensor:
    """Attend with torch to copies of rows, as the runtime does without the native library."""
    merge = SoftmaxMerge(query[:, None], scaling)
    for start in range(0, len(positions), _BLOCK_ROWS):
        block = positions[start : start + _BLOCK_ROWS]
        rows = buffer[: len(block)]
        np.take(memory, block, axis=0, out=rows)
        tensor = torch.from_numpy(rows)
        merge.add_block(
            layout.keys(tensor).transpose(0, 1).to(query.dtype),
            layout.values(tensor).transpose(0, 1).to(query.dtype),
        )
    return merge.result()[:, 0]


def bench(name: str, stored_type: StoredType, count: int, rounds: int) -> dict[str, object]:
    """Measure one shape and type, print a line and return what was measured."""
    kv_heads, group_size, head_dim = SHAPES[name]
    shape = ModelShape(1, kv_heads, kv_heads * group_size, head_dim, stored_type, 1 << 20)
    memory = memory_of(shape, _SPREAD * count)
    own = places(len(memory), count)
    layout = RowLayout(shape)
    attention = InPlaceAttention(shape)
    query, scaling = torch.randn(shape.query_heads, head_dim), head_dim**-0.5
    # The type that the runtime computes in on a CPU.
    narrow = query if stored_type is StoredType.FLOAT16 else query.to(layout.stored_type)
    buffer = np.empty((_BLOCK_ROWS, shape.row_bytes), np.uint8)
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: read_rows(
            attention.variant,
            row_addresses(memory, next(own)),
            shape.row_bytes,
            torch.get_num_threads(),
        ),
        "native": lambda: attention.attend(query, scaling, [row_addresses(memory, next(own))]),
        "gather and torch": lambda: gathered(layout, memory, buffer, narrow, scaling, next(own)),
    }
    seconds = measure(calls, rounds)
    size = count * shape.row_bytes
    figures = {
        key: Figures(size / min(taken), size / statistics.median(taken))
        for key, taken in seconds.items()
    }

    def ratio(a: str, b: str) -> float:
        # Of each round its own ratio: load that comes and goes must not fall on one side.
        return statistics.median(x / y for x, y in zip(seconds[a], seconds[b], strict=True))

    of_reading, over_torch = ratio("read", "native"), ratio("gather and torch", "native")
    rates = "  ".join(
        f"{key} {one.fastest / 1e9:6.2f} ({one.median / 1e9:5.2f})" for key, one in figures.items()
    )
    print(
        f"{name:>14} {stored_type.value:>8}  {rates}  native/read {of_reading:.2f}"
        f"  native/torch {over_torch:.2f}",
        flush=True,
    )
    return {
        "shape": name,
        "stored_type": stored_type.value,
        "rows": count,
        "row_bytes": shape.row_bytes,
        "bytes_per_second": {key: asdict(one) for key, one in figures.items()},
        "native_of_reading": of_reading,
        "native_over_torch": over_torch,
    }


def main() -> None:
    """Measure every shape and type and write a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/attention.json"))
    parser.add_argument("--rows", type=int, default=3277, help="a tenth of 32k tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    processor = ProcessorFacts.read()
    variant = native_library().variants[0]
    print(f"{variant}, {options.threads} threads; GB/s of rows, fastest round (median)")
    rows = [
        bench(shape, stored_type, options.rows, options.rounds)
        for shape in SHAPES
        for stored_type in StoredType
    ]
    report = {
        "processor": processor.name,
        "variant": variant.value,
        "threads": options.threads,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
