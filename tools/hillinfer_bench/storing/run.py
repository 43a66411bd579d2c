# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench store`: its rows, its goals, and the report."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.store.keys import CHUNK_TOKENS
from hillinfer.system.files import prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.storing.cost import CostRow, measure_cost
from hillinfer_bench.storing.damage import Losses, failing_calls, flips
from hillinfer_bench.storing.first_token import FirstToken, measure_first_token
from hillinfer_bench.storing.kills import kills
from hillinfer_bench.storing.measured import Measured
from hillinfer_bench.storing.mixed_load import MixedLoad, mixed_load
from hillinfer_bench.storing.opening import measure_opening
from hillinfer_bench.storing.part import Part
from hillinfer_bench.storing.rivals import LLAMA_CPP, VLLM, RivalRow
from hillinfer_bench.storing.sealed import SealedRow, measure_sealed
from hillinfer_bench.storing.shared import measure_shared
from hillinfer_bench.storing.speed import SHAPES, StreamRow, measure_lookups, measure_stream
from hillinfer_bench.storing.together import measure_together
from hillinfer_bench.traces.request_trace import CARRIED_TRACES, RequestTrace
from hillinfer_bench.traces.table import TraceRow, judged_rows

_LONG_TOKENS = 100_000
_OPEN_LAYERS = 2
# A shape, its layers, and processes that read at once.
_TOGETHER = ("llama-3.1-8b", 8, 8)
# Capacities at which the default is compared with LRU.
_SHARES = (0.05, 0.1, 0.2)
# Processes of the mixed load, and the time between two kills.
_MIXED, _KILL_SECONDS = 4, 7.0

Stage = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


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
    mixed_seconds
        How long four processes read, store and evict at once.
    peers
        What `tools/stored_peers.py` wrote; None for nothing.
    parts
        What of it is measured.
    """

    model: str
    directory: Path
    out: Path
    kills: int
    flips: int
    rounds: int
    tokens: int
    gigabytes: float
    mixed_seconds: float
    peers: Path | None
    parts: frozenset[Part] = frozenset(Part)


def run(
    request: StoreRequest,
    say: Callable[[str], None],
    stage: Stage,
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
    found = Measured()

    def step(part: Part, work: Callable[[], object]) -> None:
        """Take one row; where that fails, say so and go on with the others."""
        name = part.value
        if part not in request.parts:
            return
        try:
            setattr(found, name, work())
        except Exception as error:
            found.failed[name] = f"{type(error).__name__}: {error}"
            say(f"{name}: {found.failed[name]}")
        finally:
            for left in place.iterdir():
                shutil.rmtree(left, ignore_errors=True)

    try:
        step(Part.STREAMS, lambda: _streams(request, place, say))
        step(Part.SEALED, lambda: _sealed(request, place, say))
        whole = _LONG_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
        for part, measure in ((Part.OPENING, measure_opening), (Part.SHARED, measure_shared)):
            own = place / part.value
            step(part, partial(measure, own, whole, _OPEN_LAYERS, request.rounds, say))
        step(
            Part.TOGETHER,
            lambda: measure_together(place / "together", *_TOGETHER, request.rounds, say),
        )
        step(
            Part.LOOKUPS,
            lambda: measure_lookups(place / "lookups", _LONG_TOKENS, 20 * request.rounds),
        )
        # What is timed comes before what takes long, so that work beside that spoils nothing.
        step(Part.MODEL, lambda: _with_model(request, place, say))
        step(Part.SAVED, lambda: _saved(say))
        step(Part.KILLS, lambda: _staged(stage, "kills", request.kills, place, kills))
        step(Part.FLIPS, lambda: _staged(stage, "flips", request.flips, place, flips))
        step(Part.CALLS, lambda: _failing(stage, place))
        step(Part.MIXED, lambda: _mixed(request, stage, place))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    peers = _peers(request.peers)
    goals = found.goals(peers)
    record = {
        "goals": {one.name: asdict(one) for one in goals},
        **{one.name: one.reached for one in goals},
        **found.as_record(),
        "peers": peers,
    }
    request.out.write_text(json.dumps(record, indent=1))
    return found.text(goals, peers)


def _streams(request: StoreRequest, place: Path, say: Callable[[str], None]) -> list[StreamRow]:
    rows = []
    for name in SHAPES:
        own, layers = place / name, _layers(request, name)
        rows.append(measure_stream(own, name, request.tokens, layers, request.rounds, say))
        shutil.rmtree(own)
    return rows


def _sealed(request: StoreRequest, place: Path, say: Callable[[str], None]) -> SealedRow:
    name, *_ = SHAPES
    layers = _layers(request, name)
    return measure_sealed(place / "sealed", name, request.tokens, layers, request.rounds, say)


def _saved(say: Callable[[str], None]) -> list[TraceRow]:
    say("traces: the default beside LRU, ARC, Belady's and none at three capacities")
    traces = [RequestTrace.carried(name) for name in CARRIED_TRACES]
    return judged_rows(traces, _SHARES)


def _staged(
    stage: Stage,
    name: str,
    runs: int,
    place: Path,
    work: Callable[[Path, int, int, Callable[[int], None]], Losses],
) -> Losses:
    with stage(name, runs) as advance:
        return work(place / name, runs, 1, advance)


def _failing(stage: Stage, place: Path) -> Losses:
    with stage("failing calls", 500) as advance:
        return failing_calls(place / "calls", advance)


def _mixed(request: StoreRequest, stage: Stage, place: Path) -> MixedLoad:
    with stage("mixed load", int(request.mixed_seconds)) as advance:
        return mixed_load(place / "mixed", _MIXED, request.mixed_seconds, _KILL_SECONDS, advance)


def _peers(file: Path | None) -> list[dict[str, Any]]:
    """Return what other runtimes did with the same prompt, as `tools/stored_peers.py` says."""
    if file is None or not file.exists():
        why = "not asked: tools/stored_peers.py installs and asks them"
        return [asdict(RivalRow(name, skipped=why)) for name in (VLLM, LLAMA_CPP)]
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def _layers(request: StoreRequest, name: str) -> int:
    layers, row_bytes = SHAPES[name]
    return max(1, min(layers, int(request.gigabytes * 1e9 / (request.tokens * row_bytes))))


def _with_model(
    request: StoreRequest, place: Path, say: Callable[[str], None]
) -> tuple[FirstToken, CostRow, MachineKind]:
    outline = ModelOutline.read(ModelSource.locate(request.model, say), NumberType.AUTO)
    tokens = min(outline.shape.max_positions - 64, request.tokens)
    (sample,) = standard_library_samples(outline.tokenizer, tokens - 1, 1)
    loaded = outline.load()
    with torch.no_grad():
        first = measure_first_token(place / "first", loaded.model, sample, 64, request.rounds, say)
        cost = place / "cost"
        cost.mkdir()
        ids = list(sample.token_ids)[: tokens // 4]
        spent = measure_cost(cost, loaded.model, ids, max(3, request.rounds), say)
    return first, spent, MachineKind.here(loaded.model.dtype)
