# SPDX-License-Identifier: Apache-2.0
"""Measures how fast shadows are scored, beside how fast this machine reads memory.

python tools/scorer_bench.py --out build/reports/scorer.json

Every round reads the shadows' bytes with each of the library's loops for that, then scores them
where they lie, so that what else the machine does falls on all of it. `native` scores one large
array; then come the same shadows in an arena, as a cache holds them, and each in memory of its own.
`chosen` weighs one token in five of the arena, in pairs: its rate is of the tiles that hold one.
Reported are the fastest and the median round; a round's read is that of its fastest loop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.native.library import native_library
from hillinfer.scoring.coded import AlignedWeights
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer.shadow.arena import ShadowArena
from hillinfer.shadow.store import shadow_bytes
from hillinfer.system.machine import ProcessorFacts
from hillinfer_bench.native_reads import read_sum
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import KernelSpec

# KV heads, query heads per KV head, head_dim.
SHAPES = {"llama-3.1-8b": (8, 4, 128), "smollm2-135m": (3, 3, 64), "opt-6.7b": (32, 1, 128)}
MODES = (KeyMode.INT8, KeyMode.INT4, KeyMode.INT2)
SCALING = 0.02


@dataclass(frozen=True)
class Figures:
    """Bytes per second of one case.

    Parameters
    ----------
    fastest, median
        Of the rounds.
    """

    fastest: float
    median: float


def shadows(spec: KernelSpec, least_bytes: int) -> tuple[NDArray[np.uint8], list[SegmentShadow]]:
    """Return at least so many bytes of shadows: real exponents, any codes."""
    generator = np.random.default_rng(0)
    count = -(-least_bytes // spec.segment_bytes)
    memory = np.empty((count, spec.segment_beats, 64), dtype=np.uint8)
    one = generator.integers(0, 256, memory[0].shape, dtype=np.uint8)
    groups = one.reshape(-1, spec.group_beats, 64)
    exponents = generator.integers(8, 16, groups[:, : spec.kv_heads].shape, dtype=np.uint8)
    groups[:, : spec.kv_heads] = exponents
    memory[:] = one
    shape = (spec.kv_heads, spec.head_dim)
    channels = ChannelStatistics(
        generator.integers(-2, 3, shape, dtype=np.int8),
        generator.integers(-(2**16), 2**16, shape, dtype=np.int32),
    )
    length = spec.segment_tokens
    layout = ShadowLayout(spec)
    segments = []
    for index, own in enumerate(memory):
        probes = ProbeShadow(layout, index)
        probes.take(own, 0, length)
        segments.append(SegmentShadow(index * length, length, own, channels, probes))
    return memory, segments


def placed(
    segments: list[SegmentShadow], take: Callable[[], NDArray[np.uint8]]
) -> list[SegmentShadow]:
    """Return segments of the same codes, each in memory of its own that `take` returns."""
    made = []
    for one in segments:
        own = take()[: one.shadow.nbytes].reshape(one.shadow.shape)
        own[:] = one.shadow
        made.append(replace(one, shadow=own))
    return made


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every call in every round; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def measure_beside_reads(
    memory: NDArray[np.uint8], calls: dict[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of every round of some calls, and as `read` of reading the memory once.

    A round's read is that of the fastest of the library's loops for it, with torch's threads: which
    one it is differs between processors.
    """
    library, threads = native_library(), torch.get_num_threads()
    reads: dict[str, Callable[[], object]] = {
        f"read {variant.value}": partial(
            read_sum, variant, memory.ctypes.data, memory.nbytes, threads
        )
        for variant in library.variants
    }
    measured = measure(reads | calls, rounds)
    fastest = [min(own) for own in zip(*(measured[name] for name in reads), strict=True)]
    return {"read": fastest} | {name: measured[name] for name in calls}


def one_in_five(tokens: int) -> NDArray[np.int64]:
    """Return positions of about one token in five, int64 ascending, in pairs."""
    first = 2 * np.flatnonzero(np.random.default_rng(2).random(tokens // 2) < 0.2)
    return np.sort(np.concatenate((first, first + 1)))


def tile_bytes_of(spec: KernelSpec, positions: NDArray[np.int64]) -> int:
    """Return the bytes of the tiles that hold some tokens."""
    tile_tokens = 32 // spec.key_mode.code_bits
    tile_bytes = spec.kv_heads * spec.padded_head_dim // 16 * 64
    return len(np.unique(positions // tile_tokens)) * tile_bytes


def any_query(spec: KernelSpec) -> torch.Tensor:
    """Return a query of random numbers, float32 (query_heads, head_dim)."""
    numbers = np.random.default_rng(1).normal(0, 1, (spec.query_heads, spec.head_dim))
    return torch.from_numpy(numbers.astype(np.float32))


def bench(shape: str, mode: KeyMode, least_bytes: int, rounds: int) -> dict[str, object]:
    """Measure one shape and key mode, print a line and return what was measured."""
    kv_heads, group_size, head_dim = SHAPES[shape]
    spec = KernelSpec(head_dim, kv_heads, group_size, mode)
    memory, segments = shadows(spec, least_bytes)
    query = any_query(spec)
    native = NativeScorer(spec, Scope.LAYER)
    without = [replace(one, probe_copy=None) for one in segments]
    arena = placed(segments, ShadowArena(shadow_bytes(spec)).take)
    apart = placed(segments, partial(aligned_buffer, spec.segment_bytes))
    weights = AlignedWeights(spec)
    scaled, chosen = query * SCALING, one_in_five(len(segments) * spec.segment_tokens)
    calls: dict[str, Callable[[], object]] = {
        "native": lambda: native.tuples(query, SCALING, segments),
        "native in an arena": lambda: native.tuples(query, SCALING, arena),
        "native each apart": lambda: native.tuples(query, SCALING, apart),
        "native without copies": lambda: native.tuples(query, SCALING, without),
        "chosen": lambda: weights.of_each(scaled, arena, [chosen]),
    }
    sizes = dict.fromkeys(calls, memory.nbytes) | {"chosen": tile_bytes_of(spec, chosen)}
    seconds = measure_beside_reads(memory, calls, rounds)
    figures = {
        name: Figures(size / min(own), size / statistics.median(own))
        for name, own in seconds.items()
        for size in [sizes.get(name, memory.nbytes)]
    }
    # Of each round its own ratio: load that comes and goes must not fall on one side.
    shares = [a / b for a, b in zip(seconds["read"], seconds["native"], strict=True)]
    share = statistics.median(shares)
    gains = zip(seconds["native each apart"], seconds["native in an arena"], strict=True)
    gain = statistics.median(a / b for a, b in gains)
    rates = "  ".join(
        f"{name} {own.fastest / 1e9:6.2f} ({own.median / 1e9:5.2f})"
        for name, own in figures.items()
    )
    print(
        f"{shape:>14} {mode.value}  {rates}  native/read {share:.2f}  arena/apart {gain:.2f}",
        flush=True,
    )
    return {
        "shape": shape,
        "key_mode": mode.value,
        "bytes": memory.nbytes,
        "tokens": len(segments) * spec.segment_tokens,
        "bytes_per_second": {name: asdict(own) for name, own in figures.items()},
        "native_of_bandwidth": share,
        "arena_over_apart": gain,
    }


def main() -> None:
    """Measure every shape and key mode and write a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/scorer.json"))
    parser.add_argument("--mebibytes", type=int, default=512, help="of shadows, at least")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    processor = ProcessorFacts.read()
    variant = native_library().variants[0]
    print(f"{variant}, {options.threads} threads; GB/s, fastest round (median)")
    rows = [
        bench(shape, mode, options.mebibytes << 20, options.rounds)
        for shape in SHAPES
        for mode in MODES
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
