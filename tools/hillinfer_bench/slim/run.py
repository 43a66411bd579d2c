# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench slim`: its rows, its goals, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from hillinfer.errors import SettingsError
from hillinfer.models.loader import load_model
from hillinfer.pruning.profile import needle_document
from hillinfer.pruning.schedule import BLOCK_TOKENS, LayerWork, Schedule
from hillinfer.system.files import prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.slim.decoding import DecodingRow, measure_decoding
from hillinfer_bench.slim.quality import FULL, Held, QualityRow, Way, measure_quality
from hillinfer_bench.slim.speed import CACHES, DRIVE, SpeedRow, measure_speed
from hillinfer_bench.slim.text import NO_TEXTS, TextPlan, TextRow, measure_text, text_goals
from hillinfer_bench.systems.shapes import SHAPES

# Of SmolLM2-135M: what keeps its answers, and the paper's shares, which do not.
GOOD, PAPERS = "15:50%", "9:25%,19:12.5%,28:6.25%"
# Keeps what holds so much of attention's weight: other shares for other prompts.
BY_MASS = "15:mass=97%"
# Equal FLOPs for each rule, the paper's schedule with the paper's rule, a cut by mass, and what
# becomes of a document: rows of it stay for a second question, it is read whole later, or it lies
# on the drive with a quarter of its rows in DRAM.
WAYS = (
    Way(FULL),
    Way(GOOD, "weights"),
    Way(GOOD, "paper"),
    Way(GOOD, "token"),
    Way(GOOD, "recent"),
    Way(GOOD, "random"),
    Way(PAPERS, "paper"),
    Way(BY_MASS, "weights"),
    Way(GOOD, "weights", Held.ENTERING),
    Way(GOOD, "weights", Held.COMPLETED),
    Way(FULL, held=Held.DRIVE),
    Way(GOOD, "weights", Held.DRIVE),
)
# Shapes with random weights, of which three layers are built: cuts as the paper's at 32k.
SHAPED = {
    "llama-3.2-1b": "1:25%,2:12.5%",
    "qwen2.5-7b": "1:37.5%,2:18.75%",
    "llama-3.1-8b": "1:25%,2:12.5%",
}
_LAYERS, _SHAPE_TOKENS, _WARM_TOKENS = 3, (16384, 32768), 2048
_PAPER = ("llama-3.1-8b", 32768)


@dataclass(frozen=True)
class ShapeTokens:
    """A shape of the table, and how long its prompt is.

    Parameters
    ----------
    name
        Of the shape.
    tokens
        Of the prompt.
    """

    name: str
    tokens: int

    @classmethod
    def parse(cls, text: str) -> tuple[ShapeTokens, ...]:
        """Return what a text says: a shape for 16k and 32k, or one with `:` and tokens.

        Raises
        ------
        SettingsError
            Where there is no such shape, or no such number.
        """
        name, colon, tokens = text.partition(":")
        if name not in SHAPED:
            raise SettingsError(
                f"--shapes {text}: no shape {name!r}; there are {', '.join(SHAPED)}"
            )
        if not colon:
            return tuple(cls(name, one) for one in _SHAPE_TOKENS)
        if not tokens.isdecimal() or int(tokens) < 2 * BLOCK_TOKENS:
            raise SettingsError(
                f"--shapes {text}: {tokens!r} is no number of tokens from {2 * BLOCK_TOKENS} on"
            )
        return (cls(name, int(tokens)),)


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
        Shapes with random weights that are timed, and their tokens.
    ways
        How questions are asked, the first of all of a document.
    text
        Texts that are read on, token by token.
    decoding
        How prompts are read whose answers are decoded in each way.
    caches
        Into which timed prompts are read, of `CACHES`.
    new_tokens
        Decoded behind timed prompts of the real model, one row for each.
    """

    model: str
    out: Path
    contexts: tuple[int, ...]
    documents: int
    lengths: tuple[int, ...]
    rounds: int
    shapes: tuple[ShapeTokens, ...]
    ways: tuple[Way, ...] = WAYS
    text: TextPlan = NO_TEXTS
    decoding: tuple[Way, ...] = ()
    caches: tuple[str, ...] = CACHES
    new_tokens: tuple[int, ...] = (1, 16)


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
    found = _of_model(request, say) if _asks_of_model(request) else _OfModel()
    rows = list(found.rows)
    quality, decoded, texts = found.quality, found.decoded, found.texts
    kind = MachineKind.here(torch.float32)
    for one in request.shapes:
        rows += _of_shape(one, request, say)
    goals = goals_of(rows, quality) + text_goals(texts)
    record = {
        "label": "measured",
        **kind.as_record(),
        "rival": "transformers' DynamicCache, sdpa, the same chunk, the whole prompt: `ordinary`",
        "rows": [
            asdict(row) | {"flagged": row.flagged, "share_of_limit": row.share_of_limit}
            for row in rows
        ],
        "paper_schedule": paper_schedule(rows),
        "quality": [asdict(row) for row in quality],
        "decoding": [asdict(row) for row in decoded],
        "second_question": [
            {
                "way": row.way,
                "tokens": row.tokens,
                "right": row.second_right,
                "share_of_dense": row.second_share,
                "flop_share": row.second_limit,
            }
            for row in quality
            if row.second_share is not None
        ],
        "text": [asdict(row) for row in texts],
        "goals": goals,
    }
    request.out.write_text(json.dumps(record, indent=1))
    return "\n".join(f"{one['goal']}: {one['reached']} ({one['met']})" for one in goals)


@dataclass(frozen=True)
class _OfModel:
    """What was measured on the real model."""

    rows: Sequence[SpeedRow] = ()
    quality: Sequence[QualityRow] = ()
    decoded: Sequence[DecodingRow] = ()
    texts: Sequence[TextRow] = ()


def _asks_of_model(request: SlimRequest) -> bool:
    # Shapes have random weights: who asks for them alone waits for no model.
    return bool(request.contexts or request.lengths or request.text.texts > 0)


def _of_model(request: SlimRequest, say: Callable[[str], None]) -> _OfModel:
    loaded = load_model(request.model, NumberType.FLOAT32)
    model = loaded.model
    model.set_attn_implementation("sdpa")
    rows: list[SpeedRow] = []
    quality: list[QualityRow] = []
    decoded: list[DecodingRow] = []
    for tokens in request.contexts:
        (sample,) = standard_library_samples(loaded.tokenizer, tokens - 1, 1)
        ids = list(sample.token_ids)
        for new_tokens in request.new_tokens:
            schedules = (GOOD, PAPERS)
            rows += measure_speed(
                loaded.name,
                model,
                ids,
                schedules,
                request.rounds,
                new_tokens,
                tokens,
                say,
                request.caches,
            )
    for tokens in request.lengths:
        documents = [
            needle_document(loaded.tokenizer, tokens, seed) for seed in range(request.documents)
        ]
        quality += measure_quality(model, documents, request.ways, say)
        if request.decoding:
            decoded += measure_decoding(model, loaded.tokenizer, documents, request.decoding, say)
    texts = measure_text(model, request.text.samples(loaded.tokenizer), request.text.forced, say)
    return _OfModel(rows, quality, decoded, texts)


def paper_schedule(rows: Sequence[SpeedRow]) -> dict[str, object] | None:
    """Return what the paper's shape reached at its length; None where it was not timed.

    Parameters
    ----------
    rows
        Of shapes, a part of whose layers was built.
    """
    name, tokens = _PAPER
    for row in rows:
        if (row.shape, row.context, row.cache) != (*_PAPER, DRIVE) or row.schedule == FULL:
            continue
        shape = SHAPES[name]
        heads = shape.head_dim * (2 * shape.query_heads + 2 * shape.kv_heads)
        weights = shape.hidden * (heads + 3 * shape.inner)
        work = LayerWork(weights, shape.query_heads * shape.head_dim)
        limit = work.limit(Schedule.parse(name), tokens, shape.all_layers)
        return {
            "shape": name,
            "label": f"measured, {row.layers} of {shape.all_layers} layers with random weights; "
            "cuts stand where the paper's first two do, with its shares",
            "layers": row.layers,
            "schedule": row.schedule,
            "context": tokens,
            "cache": row.cache,
            "speedup": row.speedup,
            "cpu_speedup": row.cpu_speedup,
            "flop_limit": row.flop_limit,
            "all_layers": {
                "label": "computed: the share of the limit that was reached, of all layers' limit",
                "layers": shape.all_layers,
                "schedule": str(Schedule.parse(name)),
                "speedup": row.share_of_limit * limit,
                "flop_limit": limit,
            },
        }
    return None


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
    goals += [
        {
            "goal": f"{row.shape}, {row.context} tokens, {row.cache} cache, {row.schedule}: "
            "choosing at most 1 % of the time to the first token",
            "reached": round(row.choosing_share, 4),
            "met": row.choosing_share <= 0.01,
        }
        for row in rows
        if row.schedule != FULL and row.new_tokens == 1
    ]
    goals += _drive_goals(rows)
    goals += _held_goals(quality)
    whole = {row.tokens: row for row in quality if row.way == FULL}
    for row in quality:
        if row.way == Way(GOOD, "weights", Held.ENTERING).name:
            goals += _second_goals(row, whole[row.tokens])
        if row.way == Way(GOOD, "weights").name:
            asked = whole[row.tokens]
            goals += [
                {
                    "goal": f"{row.way}, {row.tokens} tokens: right at least {asked.right} - 1",
                    "reached": row.right,
                    "met": row.right >= asked.right - 1,
                },
                {
                    "goal": f"{row.way}, {row.tokens} tokens: NLL at most {asked.nll:.2f} + 0.3",
                    "reached": round(row.nll, 3),
                    "met": row.nll <= asked.nll + 0.3,
                },
                {
                    "goal": f"{row.way}, {row.tokens} tokens: the needle is kept for all "
                    f"{2 * row.documents} questions",
                    "reached": row.needles_kept,
                    "met": row.needles_kept == 2 * row.documents,
                },
            ]
            goals += _second_goals(row, asked)
    return goals


def _second_goals(row: QualityRow, whole: QualityRow) -> list[dict[str, object]]:
    """Return what a second question about a document is to reach, which chooses anew."""
    goals: list[dict[str, object]] = [
        {
            "goal": f"{row.way}, {row.tokens} tokens, second question anew: right at "
            f"least {whole.second_right} - 2",
            "reached": row.second_right,
            "met": (row.second_right or 0) >= (whole.second_right or 0) - 2,
        }
    ]
    if row.second_share is not None and row.second_limit is not None:
        most = 0.1
        goal = f"{row.way}, {row.tokens} tokens, second question anew: at most 10 % of a whole read"
        if row.second_limit > most:
            # Nothing is sooner than its operations; a quarter more than they take is asked.
            goal += f"; its operations are {row.second_limit:.1%} of it, so a quarter more"
            most = 1.25 * row.second_limit
        goals.append(
            {"goal": goal, "reached": round(row.second_share, 3), "met": row.second_share <= most}
        )
    return goals


def _held_goals(quality: Sequence[QualityRow]) -> list[dict[str, object]]:
    """Return what is to be answered of completed documents, and of those on the drive."""
    goals: list[dict[str, object]] = []
    known = {(row.way, row.tokens): row for row in quality}
    for row in quality:
        whole = known.get((FULL, row.tokens))
        if whole is not None and row.complete_seconds is not None:
            right = [row.right, row.second_right]
            further = abs(row.nll - whole.nll)
            goals += [
                {
                    "goal": f"{row.way}, {row.tokens} tokens: right {whole.right} and "
                    f"{whole.second_right}, as of a whole read",
                    "reached": right,
                    "met": right == [whole.right, whole.second_right],
                },
                {
                    "goal": f"{row.way}, {row.tokens} tokens: NLL within 0.01 of a whole read's",
                    "reached": round(further, 6),
                    "met": further <= 0.01,
                },
            ]
        whole = known.get((Way(FULL, held=Held.DRIVE).name, row.tokens))
        if whole is not None and row.way == Way(GOOD, "weights", Held.DRIVE).name:
            goals.append(
                {
                    "goal": f"{row.way}, {row.tokens} tokens: right at least {whole.right} - 1",
                    "reached": row.right,
                    "met": row.right >= whole.right - 1,
                }
            )
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
            peak, most = row.dram_peak_bytes / full.dram_peak_bytes, 0.6
            goal = (
                f"{row.shape}, {row.context} tokens, {row.schedule}: DRAM peak at most "
                "0.60 of a whole read's"
            )
            least = (row.dram_least_bytes or 0) / full.dram_peak_bytes
            if least > most:
                # Few layers share the buffers that one layer needs; a tenth more is asked.
                goal += f"; rows that stay and buffers are {least:.3f} of it, so a tenth more"
                most = 1.1 * least
            goals.append({"goal": goal, "reached": round(peak, 3), "met": peak <= most})
        if row.over_ordinary is None:
            continue
        least = 2.5 if row.new_tokens == 1 else 2.2
        goal = (
            f"{row.shape}, {row.context} tokens, {row.new_tokens} new, {row.schedule}: at least "
            f"{least} times as fast as the ordinary cache's whole read"
        )
        if row.flop_limit < least:
            # Nothing reaches what operations do not allow; four fifths of what they do is asked.
            goal += f"; operations allow {row.flop_limit:.2f}, so 0.8 of it"
            least = 0.8 * row.flop_limit
        goals.append(
            {
                "goal": goal,
                "reached": round(row.over_ordinary, 3),
                "met": None if row.flagged else row.over_ordinary >= least,
            }
        )
    return goals


def _of_shape(
    chosen: ShapeTokens, request: SlimRequest, say: Callable[[str], None]
) -> list[SpeedRow]:
    name, tokens = chosen.name, chosen.tokens
    model = replace(SHAPES[name], layers=_LAYERS).build(tokens + 16, torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 256, (tokens,), generator=generator).tolist()
    # A read takes minutes, and a short one warms up as well.
    warm = min(tokens, _WARM_TOKENS)
    schedules, rounds = (SHAPED[name],), request.rounds
    return measure_speed(name, model, ids, schedules, rounds, 1, warm, say, request.caches)
