# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench serving`: its rows, its goals, and the report."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.system.files import make_folders, prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.serving.beside.open_context import OpenContextRow
from hillinfer_bench.serving.beside.parts import beside_others, with_open_context
from hillinfer_bench.serving.beside.rivals import RivalsRow
from hillinfer_bench.serving.disconnects import DisconnectsRow, measure_disconnects
from hillinfer_bench.serving.fuzzed import FuzzedRow, measure_fuzzed
from hillinfer_bench.serving.limits import LimitRow, measure_limit
from hillinfer_bench.serving.measures import (
    COUNTS,
    CostRow,
    HealthRow,
    RestartRow,
    StreamsRow,
    measure_cost,
    measure_health,
    measure_restart,
    measure_streams,
    percentile_ms,
)
from hillinfer_bench.serving.planted import PlantedRow, measure_planted
from hillinfer_bench.serving.request import Part, ServingRequest
from hillinfer_bench.serving.servers import ServerError, hillinfer_server
from hillinfer_bench.serving.sittings import earlier, options_of
from hillinfer_bench.serving.soak import SoakRow, measure_soak
from hillinfer_bench.serving.streams import Texts, connected
from hillinfer_bench.storing.goals import StoreGoal, at_least, at_most, goals_text, unmeasured

_PARALLEL = max(COUNTS)
_SHARED_TOKENS = 200
# By streams, milliseconds, milliseconds, and of the time of reading.
_SPEEDUPS = {4: 2.0, 8: 3.0}
_OWN_MS, _HEALTH_MS, _RESTART_SHARE = 50.0, 100.0, 0.1

Say = Callable[[str], None]


@dataclass
class Measured:
    """Rows; None where one was not taken.

    Parameters
    ----------
    streams, limit, cost, health, restart, rivals, open_context, disconnects, planted, fuzzed, soak
        Of the parts.
    failed
        Why a row is missing, by its name.
    """

    streams: StreamsRow | None = None
    limit: LimitRow | None = None
    cost: CostRow | None = None
    health: HealthRow | None = None
    restart: RestartRow | None = None
    rivals: RivalsRow | None = None
    open_context: OpenContextRow | None = None
    disconnects: DisconnectsRow | None = None
    planted: PlantedRow | None = None
    fuzzed: FuzzedRow | None = None
    soak: SoakRow | None = None
    failed: dict[str, str] = field(default_factory=dict)

    def goals(self) -> list[StoreGoal]:
        """Return every goal with what was reached."""
        return [
            *self._of_streams(),
            *self._of_first_tokens(),
            *self._beside_others(),
            *self._of_load(),
        ]

    def figures(self) -> dict[str, Any]:
        """Return what has no goal of its own."""
        made: dict[str, Any] = {}
        if self.limit is not None:
            for count in _SPEEDUPS:
                made[f"limit_{count}_streams"] = self.limit.speedup(count)
        if self.streams is not None:
            for count in _SPEEDUPS:
                name = f"decode_speedup_{count}_streams"
                made[name] = median(self.streams.decode_speedups(count))
        if self.cost is not None:
            made["own_first_token_ms_median"] = median(self.cost.own_ms)
        if self.rivals is not None:
            made |= self.rivals.figures()
        return made

    def rows(self) -> dict[str, Any]:
        """Return all rows for the report."""
        return {
            part.value: asdict(row)
            for part in Part
            if (row := getattr(self, part.value)) is not None
        }

    def lines(self) -> Iterator[str]:
        """Return the rows for reading."""
        if self.streams is not None:
            yield from self.streams.lines("hillinfer")
        for row in (self.rivals, self.open_context):
            if row is not None:
                yield from row.lines()
        for name, value in self.figures().items():
            if name == "missing_servers":
                # Its lines have said so.
                continue
            if isinstance(value, dict):
                told = ", ".join(f"{figure} {ratio:.2f}" for figure, ratio in value.items())
                yield f"{name} (above 1 ours is ahead): {told}"
            else:
                yield f"{name}: {value:.3g}"
        if self.restart is not None:
            yield (
                f"after a restart {median(self.restart.stored_seconds):.2f} s with "
                f"{min(self.restart.cached_tokens)} of {max(self.restart.prompt_tokens)} tokens "
                f"stored, {median(self.restart.new_seconds):.2f} s where all is read"
            )
        if self.health is not None:
            yield (
                f"/health: {len(self.health.seconds)} asked, {self.health.bad} not 200, median "
                f"{percentile_ms(self.health.seconds, 50):.1f} ms"
            )
        for name, why in self.failed.items():
            yield f"{name} failed: {why}"

    # --- goals -----------------------------------------------------------------------------

    def _why(self, part: Part) -> str:
        return self.failed.get(part.value, "not in this run")

    def _of_streams(self) -> Iterator[StoreGoal]:
        for count, limit in _SPEEDUPS.items():
            name = f"speedup_{count}_streams"
            if self.streams is None:
                yield unmeasured(name, f">= {limit:g}", self._why(Part.STREAMS))
            else:
                # One and many are of the same round, so that slow drift is in both.
                ratios = self.streams.speedups(count)
                allowed = None if self.limit is None else self.limit.speedup(count)
                yield at_least(name, median(ratios), limit, ratios, allowed=allowed)

    def _of_first_tokens(self) -> Iterator[StoreGoal]:
        name, goal = "own_first_token_ms_p95", f"<= {_OWN_MS:g}"
        if self.cost is None:
            yield unmeasured(name, goal, self._why(Part.COST))
        else:
            # Slow ones count, so that a noisy machine makes it worse and not unsure.
            yield at_most(name, percentile_ms([one / 1e3 for one in self.cost.own_ms], 95), _OWN_MS)
        name, goal = "health_p99_ms", f"<= {_HEALTH_MS:g}"
        if self.health is None:
            yield unmeasured(name, goal, self._why(Part.HEALTH))
        else:
            made = at_most(name, self.health.p99_ms, _HEALTH_MS)
            if self.health.bad:
                # One that was refused or failed is no answer, however soon it came.
                made = replace(made, is_met=False, why=f"{self.health.bad} were not 200")
            yield made
        name, goal = "first_token_after_restart_share", f"<= {_RESTART_SHARE:g}"
        if self.restart is None:
            yield unmeasured(name, goal, self._why(Part.RESTART))
        else:
            shares = self.restart.shares
            yield at_most(name, median(shares), _RESTART_SHARE, shares)

    def _beside_others(self) -> Iterator[StoreGoal]:
        """Return the goals that other servers set, where those parts were asked for."""
        figures = {} if self.rivals is None else self.rivals.figures()
        if ratios := figures.get("vs_transformers_serve"):
            worst = min(ratios, key=lambda name: ratios[name])
            name = "least_vs_transformers_serve"
            made = at_least(name, ratios[worst], 1)
            yield made if made.is_met else replace(made, why=f"behind in {worst}")
        if (rank := figures.get("first_token_after_restart_rank")) is not None:
            yield at_most("first_token_after_restart_rank", rank, 1)
        if (row := self.open_context) is not None:
            yield at_most("open_context_unanswered", row.unanswered, 0)
            yield at_most("open_context_above_budget_bytes", row.above_bytes, 0)
            yield at_most("open_context_rival_documents", row.most_rival, row.documents - 1)
        for part in (Part.RIVALS, Part.OPEN_CONTEXT):
            if part.value in self.failed:
                yield unmeasured(part.value, "", self.failed[part.value])

    def _of_load(self) -> Iterator[StoreGoal]:
        """Return the goals of what only loads the server: nothing of it may happen once."""
        never: dict[Part, dict[str, float] | None] = dict.fromkeys(
            (Part.DISCONNECTS, Part.PLANTED, Part.FUZZED, Part.SOAK)
        )
        if (left := self.disconnects) is not None:
            never[Part.DISCONNECTS] = {"ended_late": left.late, "left_behind": left.leaked}
        if (planted := self.planted) is not None:
            never[Part.PLANTED] = {"mixed_answers": planted.mixed, "leaks": planted.leaks}
        if self.fuzzed is not None:
            never[Part.FUZZED] = {"http_500": self.fuzzed.defects}
        if (soak := self.soak) is not None:
            above = max(0.0, soak.most_dram_bytes - soak.budget_bytes)
            lost = soak.differing + soak.unanswered
            never[Part.SOAK] = {"soak_differing": lost, "soak_above_budget_bytes": above}
        whole = {
            part: f"{row.asked:,} of {row.wanted:,} requests so far"
            for part, row in ((Part.PLANTED, planted), (Part.FUZZED, self.fuzzed))
            if row is not None and row.asked < row.wanted
        }
        for part, found in never.items():
            if found is None:
                if part in self.failed:
                    yield unmeasured(part.value, "0", self.failed[part.value])
            else:
                for name, count in found.items():
                    made = at_most(name, count, 0)
                    # Nothing of it in some of them says nothing of the others.
                    is_open = part in whole and made.is_met
                    yield replace(made, is_met=None, why=whole[part]) if is_open else made


def run(request: ServingRequest, say: Say) -> str:
    """Measure everything and return the table.

    Parameters
    ----------
    request
        What to measure.
    say
        Takes a line before each step that takes time.

    Raises
    ------
    HillInferError
        Where the model or the place is none; what fails later has a line in the report.
    """
    prepare_report(request.out, "--out")
    outline = ModelOutline.read(ModelSource.locate(request.model, say), NumberType.AUTO)
    texts = Texts(outline.tokenizer)
    prompts = [texts.take(request.prompt_tokens) for _ in range(_PARALLEL)]
    document = texts.take(request.document_tokens)
    make_folders(request.directory)
    rows = earlier(request)
    place = Path(tempfile.mkdtemp(prefix="hillinfer-serving-", dir=request.directory))
    found = Measured(
        planted=PlantedRow.of_record(rows["planted"]) if "planted" in rows else None,
        fuzzed=FuzzedRow.of_record(rows["fuzzed"]) if "fuzzed" in rows else None,
    )
    try:
        _with_one_server(request, place / "streams", prompts, found, say)
        _step(
            *(request, Part.LIMIT, found, say),
            lambda: measure_limit(outline.load().model, COUNTS, request.rounds, say),
        )
        shutil.rmtree(place / "streams", ignore_errors=True)
        start = partial(
            hillinfer_server, place / "restart", request.model, _PARALLEL, python=request.python
        )
        _step(
            *(request, Part.RESTART, found, say),
            lambda: measure_restart(start, document, request.rounds, say),
        )
        _step(
            *(request, Part.RIVALS, found, say),
            lambda: beside_others(request, place / "rivals", outline, prompts, document, say),
        )
        _step(
            *(request, Part.OPEN_CONTEXT, found, say),
            lambda: with_open_context(request, place / "open", outline, say),
        )
        load_server(request, place, found, texts, say)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    goals = found.goals()
    record = {
        "goals": {one.name: asdict(one) for one in goals},
        **{one.name: one.reached for one in goals},
        **found.figures(),
        **found.rows(),
        "failed": found.failed,
        "rounds": request.rounds,
        "new_tokens": request.new_tokens,
        **options_of(request),
        "load": asdict(request.load),
        **MachineKind.here(outline.dtype).as_record(),
    }
    request.out.write_text(json.dumps(record, indent=1))
    return "\n".join([*found.lines(), goals_text(goals)])


def _with_one_server(
    request: ServingRequest, place: Path, prompts: list[str], found: Measured, say: Say
) -> None:
    """Take the parts that need stored prompts, on one server that has them."""
    parts = {Part.STREAMS, Part.COST, Part.HEALTH} & request.parts
    if not parts:
        return
    rounds, new_tokens = request.rounds, request.new_tokens
    try:
        with (
            hillinfer_server(place, request.model, _PARALLEL, python=request.python) as server,
            connected(server) as client,
        ):
            say(f"{len(prompts)} prompts are stored")
            for one in prompts:
                client.store(one)
            _step(
                *(request, Part.STREAMS, found, say),
                lambda: measure_streams(server, client, prompts, new_tokens, rounds, say),
            )
            _step(
                *(request, Part.COST, found, say),
                lambda: measure_cost(client, prompts, rounds),
            )
            _step(
                *(request, Part.HEALTH, found, say),
                lambda: measure_health(server, client, prompts, new_tokens, rounds),
            )
    except Exception as error:
        for part in parts:
            if getattr(found, part.value) is None:
                found.failed.setdefault(part.value, _said(error))
        say(_said(error))


def load_server(
    request: ServingRequest, place: Path, found: Measured, texts: Texts, say: Say
) -> None:
    """Take the parts that load a server, each with one of its own."""
    sizes = request.load
    own_server = partial(
        hillinfer_server, model=request.model, parallel=_PARALLEL, python=request.python
    )

    def disconnects() -> DisconnectsRow:
        with (
            own_server(place / "left") as server,
            connected(server) as client,
        ):
            prompts = [texts.take(request.prompt_tokens) for _ in range(_PARALLEL)]
            for one in prompts:
                client.store(one)
            return measure_disconnects(
                server, client, prompts, request.new_tokens, sizes.disconnects, say
            )

    def planted() -> PlantedRow:
        keys = [f"sk-of-tenant-{number:02d}" for number in range(_PARALLEL)]
        own = place / "planted"
        own.mkdir()
        (own / "keys").write_text("\n".join(keys))
        (own / "keys").chmod(0o600)
        options = ("--api-key-file", str(own / "keys"), "--queue", "64")
        head = {"Authorization": f"Bearer {keys[0]}"}
        with own_server(own, options=options, headers=head) as server:
            shared = texts.take(min(request.prompt_tokens, _SHARED_TOKENS))
            return measure_planted(
                *(server, keys, shared.lower(), sizes.planted, say, found.planted),
                math.inf if sizes.sitting_seconds is None else sizes.sitting_seconds,
            )

    def fuzzed() -> FuzzedRow:
        # Answers of any length are asked for: bounds keep them short.
        options = ("--context", "256", "--answer-tokens", "4", "--max-seconds", "20")
        with own_server(place / "fuzzed", options=options) as server:
            return measure_fuzzed(server, sizes.fuzzed, found.fuzzed, sizes.sitting_seconds)

    def soak() -> SoakRow:
        files = place / "soak" / "files"
        options = ["--files", str(files), "--reuse", "exact", "--dram-budget", "256MiB"]
        options += ["--queue", "64"]
        start = partial(own_server, place / "soak", options=options)
        documents = [texts.take(request.prompt_tokens) for _ in range(sizes.soak_documents)]
        return measure_soak(start, documents, sizes.soak_seconds, sizes.kill_seconds, say)

    works: dict[Part, Callable[[], object]] = {
        Part.DISCONNECTS: disconnects,
        Part.PLANTED: planted,
        Part.FUZZED: fuzzed,
        Part.SOAK: soak,
    }
    complete = {
        part
        for part, row in ((Part.PLANTED, found.planted), (Part.FUZZED, found.fuzzed))
        if row is not None and row.asked >= row.wanted
    }
    for part, work in works.items():
        if part in complete & request.parts:
            say(f"{part.value}: earlier sittings asked all")
        else:
            _step(request, part, found, say, work)


def _step(
    request: ServingRequest, part: Part, found: Measured, say: Say, work: Callable[[], object]
) -> None:
    """Take one row; where that fails, say so and go on with the others."""
    if part not in request.parts:
        return
    say(f"{part.value}: {request.rounds} rounds")
    try:
        setattr(found, part.value, work())
    except Exception as error:
        found.failed[part.value] = _said(error)
        say(f"{part.value}: {found.failed[part.value]}")


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
