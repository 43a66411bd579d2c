# SPDX-License-Identifier: Apache-2.0
"""Measures how fast attention reads value codes, beside how fast this machine reads memory.

python tools/coded_bench.py --out build/reports/coded.json

Every round reads the value shadows' bytes with each of the library's loops for that, then attends
to their tokens layer by layer, all of them or one in five, so that what else the machine does falls
on all of it. Layers share their L': scoring has just written them then, so they are in a cache.
Rates are of the code rows and exponents of the tokens that are attended to; L' and the outputs are
not counted. Reported are the fastest and the median round; a round's read is its fastest loop's.

Of one token in five, `limit` is the share of the read bandwidth that a loop gets which reads the
same code rows at their addresses and computes nothing: what memory gives single tokens.

With `--products`, `limit` is also no more than what products alone allow: each query head takes
four `vpdpbusd` of 512 bits for 64 bytes, because addends have two bytes and codes four bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.library import Variant, native_library
from hillinfer.shadow.arena import ShadowArena
from hillinfer.system.machine import ProcessorFacts
from hillinfer_bench.native_reads import read_rows
from hillinfer_bench.precision.coded_attention import CodedAttention, CodedSegment, CodePlaces
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.value_layout import code_row_bytes, value_segment_beats
from scorer_bench import SHAPES, measure_beside_reads

# Attended to are all tokens, or one in so many.
STEPS = (1, 5)
# Of a layer, which is attended to at once.
LAYER_TOKENS = 32768
# Of the read bandwidth; and of what a limit allows, where that is less.
GOAL, GOAL_OF_LIMIT = 0.7, 0.8


def segments_of(spec: KernelSpec, memory: np.ndarray, step: int) -> list[CodedSegment]:
    """Return segments of random codes in an arena, as shadows lie, with one token in `step`.

    Segments that are a layer apart have the same L'.
    """
    generator = np.random.default_rng(step)
    channels = spec.kv_heads, spec.head_dim
    count = spec.segment_tokens // step
    aligned = [
        generator.normal(0, 512, (spec.query_heads, count)).astype(np.int32)
        for _ in range(min(len(memory), LAYER_TOKENS // spec.segment_tokens))
    ]
    made: list[CodedSegment] = []
    take = ShadowArena(round_up(memory[0].nbytes, PAGE_BYTES)).take
    for one in memory:
        shadow = take()[: one.nbytes].reshape(one.shape)
        shadow[:] = one
        tokens = np.sort(generator.permutation(spec.segment_tokens)[:count])
        statistics_ = ChannelStatistics(
            generator.integers(-2, 3, channels, dtype=np.int8),
            generator.integers(-(2**16), 2**16, channels, dtype=np.int32),
        )
        made.append(
            CodedSegment(
                aligned[len(made) % len(aligned)],
                np.zeros((spec.kv_heads, count), np.bool_),
                CodePlaces.in_shadow(shadow, tokens, spec),
                statistics_,
            )
        )
    return made


class LayersAttention:
    """Attends to segments as to one layer after the other, without describing them again.

    Parameters
    ----------
    shape
        The model's.
    variant
        Instructions to use.
    segments
        Of all layers.
    layer_segments
        Of each layer.
    """

    def __init__(
        self,
        shape: ModelShape,
        variant: Variant,
        segments: list[CodedSegment],
        layer_segments: int,
    ) -> None:
        self._attention = CodedAttention(shape, variant)
        self._layers = [
            self._attention.described(segments[first : first + layer_segments])
            for first in range(0, len(segments), layer_segments)
        ]
        self._no_rows = np.empty(0, np.uint64)

    def attend(self, scaled: NDArray[np.float32]) -> None:
        """Attend in every layer."""
        for one in self._layers:
            self._attention.attend(scaled, self._no_rows, one)


def products_allow(name: str, products: float, threads: int) -> float:
    """Return how many bytes of a shape's codes products alone allow, a second.

    `products` is how many instructions of 512 bits a core makes; a thread has whole KV heads.
    """
    kv_heads, group_size, _ = SHAPES[name]
    return products / (4 * group_size) * 64 * kv_heads / -(-kv_heads // threads)


def bench(
    name: str, least_bytes: int, rounds: int, variants: tuple[Variant, ...], products: float
) -> dict[str, object]:
    """Measure one shape, print a line for each step and return what was measured."""
    kv_heads, group_size, head_dim = SHAPES[name]
    spec = KernelSpec(head_dim, kv_heads, group_size)
    shape = ModelShape(1, kv_heads, kv_heads * group_size, head_dim, StoredType.FLOAT16, 1 << 20)
    segment_bytes = value_segment_beats(spec) * 64
    generator = np.random.default_rng(0)
    one = generator.integers(0, 256, (value_segment_beats(spec), 64), dtype=np.uint8)
    groups = one.reshape(-1, kv_heads * (1 + code_row_bytes(spec) // kv_heads), 64)
    groups[:, :kv_heads] = generator.integers(4, 12, groups[:, :kv_heads].shape, dtype=np.uint8)
    memory = np.empty((-(-least_bytes // segment_bytes), *one.shape), np.uint8)
    memory[:] = one
    scaled = generator.normal(0, 1, (spec.query_heads, head_dim)).astype(np.float32)
    token_bytes = code_row_bytes(spec) + kv_heads
    made: dict[str, object] = {"shape": name, "bytes": memory.nbytes}
    for step in STEPS:
        segments = segments_of(spec, memory, step)
        read = sum(len(one.places.code_rows) for one in segments) * token_bytes
        rows = np.concatenate([one.places.code_rows for one in segments])
        threads = torch.get_num_threads()
        layer_segments = LAYER_TOKENS // spec.segment_tokens
        calls: dict[str, Callable[[], object]] = {
            variant.value: partial(
                LayersAttention(shape, variant, segments, layer_segments).attend, scaled
            )
            for variant in variants
        }
        calls["rows"] = partial(read_rows, variants[0], rows, code_row_bytes(spec), threads)
        seconds = measure_beside_reads(memory.reshape(-1), calls, rounds)
        sizes = {"read": memory.nbytes} | dict.fromkeys(calls, read)
        rates = {
            key: {"fastest": sizes[key] / min(own), "median": sizes[key] / statistics.median(own)}
            for key, own in seconds.items()
        }
        shares = {
            key: statistics.median(
                (read / a) / (memory.nbytes / b)
                for a, b in zip(seconds[key], seconds["read"], strict=True)
            )
            for key in calls
        }
        text = "  ".join(
            f"{key} {own['fastest'] / 1e9:6.2f} ({own['median'] / 1e9:5.2f})"
            for key, own in rates.items()
        )
        told = "  ".join(f"{key}/read {share:.2f}" for key, share in shares.items())
        of_rows = shares.pop("rows")
        # All tokens lie in order, and memory is read as it is read alone.
        limit = 1.0 if step == 1 else min(1.0, of_rows)
        limit = min(limit, products_allow(name, products, threads) / rates["read"]["median"])
        print(f"{name:>14} 1 in {step}  {text}  {told}  limit {limit:.2f}", flush=True)
        allowed = min(GOAL, GOAL_OF_LIMIT * limit)
        made[f"one_in_{step}"] = {
            "bytes_per_second": rates,
            "of_bandwidth": shares,
            "limit": limit,
            "of_limit": {key: share / limit for key, share in shares.items()},
            "is_reached": {key: share >= allowed for key, share in shares.items()},
        }
    return made


def main() -> None:
    """Measure every shape and write a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/coded.json"))
    parser.add_argument("--mebibytes", type=int, default=256, help="of value shadows, at least")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--products",
        type=float,
        default=float("inf"),
        help="vpdpbusd of 512 bits that a core makes, thousand millions a second (3.65 on a Zen 4)",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    processor = ProcessorFacts.read()
    # Portable code stands for no machine's speed.
    variants = tuple(one for one in native_library().variants if one is not Variant.PORTABLE) or (
        Variant.PORTABLE,
    )
    print(f"{processor.name}, {options.threads} threads; GB/s, fastest round (median)")
    rows = [
        bench(name, options.mebibytes << 20, options.rounds, variants, options.products * 1e9)
        for name in SHAPES
    ]
    report = {"processor": processor.name, "threads": options.threads, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
