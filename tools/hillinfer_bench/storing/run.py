# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench store`: its rows, its goals, and the report."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.system.files import prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.storing.damage import Losses, failing_calls, flips
from hillinfer_bench.storing.first_token import FirstToken, measure_first_token
from hillinfer_bench.storing.kills import kills
from hillinfer_bench.storing.speed import (
    SHAPES,
    LookupRow,
    StreamRow,
    measure_lookups,
    measure_stream,
)

# A spread above this says that the machine was not quiet.
_NOISE = 0.2
_LONG_TOKENS = 100_000


@dataclass(frozen=True)
class StoreRequest:
    """Options of one run.

    Parameters
    ----------
    model
        Real model for the time to the first token.
    directory
        On the drive; stores are made there and removed.
    out
        Where the JSON goes.
    kills, flips
        How many.
    rounds
        Of each timed figure.
    tokens
        Stored of each shape, a multiple of 1,024.
    gigabytes
        Most that a shape's rows may take; it has fewer layers then.
    """

    model: str
    directory: Path
    out: Path
    kills: int
    flips: int
    rounds: int
    tokens: int
    gigabytes: float


@dataclass(frozen=True)
class StoreGoal:
    """What is aimed at, and what was reached.

    Parameters
    ----------
    name
        Of the figure.
    goal
        In words, with its sign.
    reached
        The figure; None where it was not measured.
    is_met
        None where it was not measured.
    is_noisy
        Whether rounds differ by more than a fifth: then nothing counts as met.
    """

    name: str
    goal: str
    reached: float | None
    is_met: bool | None
    is_noisy: bool = False


def run(
    request: StoreRequest,
    say: Callable[[str], None],
    stage: Callable[[str, int], AbstractContextManager[Callable[[int], None]]],
) -> str:
    """Measure everything and return the table.

    Parameters
    ----------
    request
        What to measure.
    say
        Takes a line before each step that takes time.
    stage
        Shows progress: called with a name and a total, gives a function that takes what is done.
    """
    prepare_report(request.out, "--out")
    place = Path(tempfile.mkdtemp(prefix="hillinfer-store-", dir=request.directory))
    try:
        streams = [
            measure_stream(
                place / name, name, request.tokens, _layers(request, name), request.rounds, say
            )
            for name in SHAPES
        ]
        for name in SHAPES:
            shutil.rmtree(place / name)
        lookups = measure_lookups(place / "lookups", _LONG_TOKENS, 20 * request.rounds)
        damage = {}
        with stage("kills", request.kills) as advance:
            damage["kills"] = kills(place / "kills", request.kills, 1, advance)
        (place / "calls").mkdir()
        with stage("failing calls", 200) as advance:
            damage["calls"] = failing_calls(place / "calls", advance)
        (place / "flips").mkdir()
        with stage("flips", request.flips) as advance:
            damage["flips"] = flips(place / "flips", request.flips, 1, advance)
        first, kind = _first_token(request, place / "first", say)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    goals = _goals(streams, lookups, damage, first)
    record = {
        "goals": {one.name: asdict(one) for one in goals},
        **{one.name: one.reached for one in goals},
        "streams": [asdict(row) | {"share_of_drive": row.share_of_drive} for row in streams],
        "lookups": {"tokens": lookups.tokens, "p99_milliseconds": lookups.p99},
        "damage": {name: asdict(losses) for name, losses in damage.items()},
        "first_token": asdict(first) | {"allowed_seconds": first.allowed_seconds},
        **kind.as_record(),
    }
    request.out.write_text(json.dumps(record, indent=1))
    return _table(goals, streams, first)


def _layers(request: StoreRequest, name: str) -> int:
    layers, row_bytes = SHAPES[name]
    return max(1, min(layers, int(request.gigabytes * 1e9 / (request.tokens * row_bytes))))


def _first_token(
    request: StoreRequest, place: Path, say: Callable[[str], None]
) -> tuple[FirstToken, MachineKind]:
    outline = ModelOutline.read(ModelSource.locate(request.model, say), NumberType.AUTO)
    tokens = min(outline.shape.max_positions - 64, request.tokens)
    (sample,) = standard_library_samples(outline.tokenizer, tokens - 1, 1)
    loaded = outline.load()
    with torch.no_grad():
        found = measure_first_token(place, loaded.model, sample, 64, request.rounds, say)
    return found, MachineKind.here(loaded.model.dtype)


def _goals(
    streams: list[StreamRow], lookups: LookupRow, damage: dict[str, Losses], first: FirstToken
) -> list[StoreGoal]:
    least = min(streams, key=lambda row: row.share_of_drive)
    timed = [rounds for row in streams for rounds in (row.stream_seconds, row.drive_seconds)]
    wrong = sum(one.wrong_tokens for one in damage.values())
    reached = median(first.stored_seconds)
    compute, read = median(first.compute_seconds), median(first.read_seconds)
    hidden = (compute + read - reached) / min(compute, read)
    own = first.stored_seconds
    return [
        _at_least("stream_share_of_drive", least.share_of_drive, 0.9, *timed),
        _at_least("ttft_speedup_vs_recompute", first.speedup, 50, own),
        _at_most("ttft_over_allowed", reached / first.allowed_seconds, 1, own),
        _at_least("hidden_share", hidden, 0.8, own),
        _at_most("lookup_p99_milliseconds", lookups.p99, 5),
        _at_most("extra_bytes", max(row.extra_bytes for row in streams), 0.02),
        _at_least("kills", damage["kills"].runs, 500),
        _at_most("wrong_tokens", wrong, 0),
        _at_most("lost_chunks", damage["kills"].lost_chunks, 0),
        _at_most("flips_undetected", damage["flips"].wrong_tokens, 0),
        _at_most("slowest_opening", damage["kills"].slowest_opening, 1),
        _at_most("leaks", damage["kills"].leaks, 0),
        StoreGoal("open_share_of_stream", "opening in place is not there yet", None, None),
    ]


def _at_least(name: str, reached: float, bound: float, *rounds: list[float]) -> StoreGoal:
    is_noisy = any(map(_is_noisy, rounds))
    met = reached >= bound and not is_noisy
    return StoreGoal(name, f">= {bound:g}", float(reached), met, is_noisy)


def _at_most(name: str, reached: float, bound: float, *rounds: list[float]) -> StoreGoal:
    is_noisy = any(map(_is_noisy, rounds))
    met = reached <= bound and not is_noisy
    return StoreGoal(name, f"<= {bound:g}", float(reached), met, is_noisy)


def _is_noisy(seconds: list[float]) -> bool:
    low, high = np.quantile(seconds, (0.25, 0.75))
    return bool(high > (1 + _NOISE) * low)


def _table(goals: list[StoreGoal], streams: list[StreamRow], first: FirstToken) -> str:
    lines = [
        f"{row.shape:>14}: {row.tokens} tokens, {row.byte_count / 1e6:.0f} MB of rows, "
        f"{row.gigabytes_per_second:.2f} GB/s, {row.share_of_drive:.2f} of plain 1 MiB reads"
        for row in streams
    ]
    lines.append(
        f"first token, {first.stored_tokens} stored and {first.new_tokens} new tokens: "
        f"{median(first.stored_seconds):.2f} s (reading {median(first.read_seconds):.2f}, "
        f"computing {median(first.compute_seconds):.2f}); recomputing {first.recompute_seconds:.1f}"
    )
    for one in goals:
        verdict = {None: "not measured", True: "met", False: "not met"}[one.is_met]
        noise = " !" if one.is_noisy else ""
        reached = "" if one.reached is None else f"{one.reached:.3g}{noise}"
        lines.append(f"{one.name:>28}  {reached:>10}  goal {one.goal}: {verdict}")
    return "\n".join(lines)
