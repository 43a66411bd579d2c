# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench slim`: its rows, its goals, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from hillinfer.models.loader import load_model
from hillinfer.pruning.needles import needle_document
from hillinfer.system.files import prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.slim.decoding import DecodingRow, measure_decoding
from hillinfer_bench.slim.quality import FULL, QualityRow, Way, measure_quality
from hillinfer_bench.slim.speed import DRIVE, SpeedRow, measure_speed
from hillinfer_bench.systems.shapes import SHAPES

# Of SmolLM2-135M: what keeps its answers, and the paper's shares, which do not.
GOOD, PAPERS = "15:50%", "9:25%,19:12.5%,28:6.25%"
# Keeps what holds so much of attention's weight: other shares for other prompts.
BY_MASS = "15:mass=97%"
# Equal FLOPs for each rule, the paper's schedule with the paper's rule, and a cut by mass.
WAYS = (
    Way(FULL),
    Way(GOOD, "weights"),
    Way(GOOD, "paper"),
    Way(GOOD, "token"),
    Way(GOOD, "recent"),
    Way(GOOD, "random"),
    Way(PAPERS, "paper"),
    Way(BY_MASS, "weights"),
)
# Shapes with random weights: layers that are built, cuts, and tokens.
_SHAPED = (
    ("llama-3.2-1b", 3, "1:25%,2:12.5%", 16384),
    ("qwen2.5-7b", 3, "1:37.5%,2:18.75%", 16384),
)
_PAPER = ("llama-3.1-8b", 3, "1:8192,2:4096", 32768)


@dataclass(frozen=True)
class SlimRequest:
    """Options of one run.

    Parameters
    ----------
    model
        The real model.
    out
        Where the JSON goes.
    contexts
        Tokens of prompts of the real model that are timed.
    documents, lengths
        How many documents with needles, and their tokens.
    rounds
        Of each timed figure.
    shapes
        Shapes with random weights that are timed, by their names in the table.
    ways
        How questions are asked, the first of all of a document.
    decoding
        How prompts are read whose answers are decoded in each way.
    """

    model: str
    out: Path
    contexts: tuple[int, ...]
    documents: int
    lengths: tuple[int, ...]
    rounds: int
    shapes: tuple[str, ...]
    ways: tuple[Way, ...] = WAYS
    decoding: tuple[Way, ...] = ()


def run(request: SlimRequest, say: Callable[[str], None]) -> str:
    """Measure everything and return the table of goals.

    Parameters
    ----------
    request
        What to measure.
    say
        Takes a line of progress.
    """
    prepare_report(request.out, "--out")
    loaded = load_model(request.model, NumberType.FLOAT32)
    model = loaded.model
    model.set_attn_implementation("sdpa")
    rows: list[SpeedRow] = []
    quality: list[QualityRow] = []
    decoded: list[DecodingRow] = []
    for tokens in request.contexts:
        (sample,) = standard_library_samples(loaded.tokenizer, tokens - 1, 1)
        ids = list(sample.token_ids)
        for new_tokens in (1, 16):
            schedules = (GOOD, PAPERS)
            rows += measure_speed(
                loaded.name, model, ids, schedules, request.rounds, new_tokens, say
            )
    for tokens in request.lengths:
        documents = [
            needle_document(loaded.tokenizer, tokens, seed) for seed in range(request.documents)
        ]
        quality += measure_quality(model, documents, request.ways, say)
        if request.decoding:
            decoded += measure_decoding(model, loaded.tokenizer, documents, request.decoding, say)
    kind = MachineKind.here(model.dtype)
    del loaded, model
    shaped = [one for one in _SHAPED if one[0] in request.shapes]
    paper = [one for one in (_PAPER,) if one[0] in request.shapes]
    shape_rows = [_of_shape(one, request.rounds, say) for one in (*shaped, *paper)]
    rows += [row for own in shape_rows for row in own]
    goals = goals_of(rows, quality)
    record = {
        "label": "measured",
        **kind.as_record(),
        "rival": "transformers' DynamicCache, sdpa, the same chunk, the whole prompt: `ordinary`",
        "rows": [
            asdict(row) | {"flagged": row.flagged, "share_of_limit": row.share_of_limit}
            for row in rows
        ],
        "paper_schedule": next(
            (
                {
                    "shape": row.shape,
                    "layers": row.layers,
                    "context": row.context,
                    "cache": row.cache,
                    "speedup": row.speedup,
                    "flop_limit": row.flop_limit,
                }
                for row in rows
                if (row.shape, row.cache) == (_PAPER[0], DRIVE) and row.schedule != FULL
            ),
            None,
        ),
        "quality": [asdict(row) for row in quality],
        "decoding": [asdict(row) for row in decoded],
        "second_question": [
            {
                "way": row.way,
                "tokens": row.tokens,
                "right": row.second_right,
                "share_of_dense": row.second_share,
            }
            for row in quality
            if row.second_share is not None
        ],
        "goals": goals,
    }
    request.out.write_text(json.dumps(record, indent=1))
    return "\n".join(f"{one['goal']}: {one['reached']} ({one['met']})" for one in goals)


def goals_of(rows: Sequence[SpeedRow], quality: Sequence[QualityRow]) -> list[dict[str, object]]:
    """Return each goal beside what was reached; `met` is None where rounds say nothing."""
    goals: list[dict[str, object]] = [
        {
            "goal": f"{row.shape}, {row.context} tokens, {row.cache} cache, {row.schedule}: at "
            f"least 0.90 of {row.flop_limit:.2f}",
            "reached": round(row.share_of_limit, 3),
            "met": None if row.flagged else row.share_of_limit >= 0.9,
        }
        for row in rows
        if row.schedule != FULL and row.new_tokens == 1
    ]
    goals += _drive_goals(rows)
    whole = {row.tokens: row for row in quality if row.way == FULL}
    for row in quality:
        if row.way == Way(GOOD, "weights").name:
            asked = whole[row.tokens]
            goals += [
                {
                    "goal": f"{row.way}, {row.tokens} tokens: right at least {asked.right} - 1",
                    "reached": row.right,
                    "met": row.right >= asked.right - 1,
                },
                {
                    "goal": f"{row.way}, {row.tokens} tokens, second question anew: right at "
                    f"least {asked.second_right} - 2",
                    "reached": row.second_right,
                    "met": (row.second_right or 0) >= (asked.second_right or 0) - 2,
                },
            ]
    return goals


def _drive_goals(rows: Sequence[SpeedRow]) -> list[dict[str, object]]:
    """Return what the paper's shares are to reach in HillInfer's own cache."""
    goals: list[dict[str, object]] = []
    dense = {
        (row.shape, row.context, row.new_tokens): row
        for row in rows
        if (row.cache, row.schedule) == (DRIVE, FULL)
    }
    for row in rows:
        full = dense.get((row.shape, row.context, row.new_tokens))
        if full is None or row.cache != DRIVE or row.schedule in (FULL, GOOD):
            continue
        if row.new_tokens == 1 and row.dram_peak_bytes and full.dram_peak_bytes:
            peak = row.dram_peak_bytes / full.dram_peak_bytes
            goals.append(
                {
                    "goal": f"{row.shape}, {row.context} tokens, {row.schedule}: DRAM peak at most "
                    "0.60 of a whole read's",
                    "reached": round(peak, 3),
                    "met": peak <= 0.6,
                }
            )
        least = 2.5 if row.new_tokens == 1 else 2.2
        goals.append(
            {
                "goal": f"{row.shape}, {row.context} tokens, {row.new_tokens} new, {row.schedule}: "
                f"at least {least} times as fast as the ordinary cache's whole read",
                "reached": round(row.over_ordinary, 3),
                "met": None if row.flagged else row.over_ordinary >= least,
            }
        )
    return goals


def _of_shape(
    chosen: tuple[str, int, str, int], rounds: int, say: Callable[[str], None]
) -> list[SpeedRow]:
    name, layers, schedule, tokens = chosen
    model = replace(SHAPES[name], layers=layers).build(tokens + 16, torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 256, (tokens,), generator=generator).tolist()
    return measure_speed(name, model, ids, (schedule,), rounds, 1, say)
