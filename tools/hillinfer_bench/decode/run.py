# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench decode`, from options to report, table and pictures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch

from hillinfer.doctor.finding import python_version, run_packages
from hillinfer.drive.directories import DriveFacts, prepared_cold_dir
from hillinfer.errors import HillInferError, SettingsError
from hillinfer.hf.attach import Attachment
from hillinfer.models.loader import LoadedModel, ModelOutline
from hillinfer.models.sources import ModelSource, local_model
from hillinfer.settings import QuerySource, Settings
from hillinfer.system.files import check_outside, prepare_report
from hillinfer.system.machine import ProcessorFacts
from hillinfer_bench.decode.joined import joined_steps, joined_tokens, measure_joined
from hillinfer_bench.decode.measuring import Bed, blank_row, measure_case
from hillinfer_bench.decode.plan import JOINED_PART, check_one_traced, make_plan
from hillinfer_bench.decode.rates import RateProbe, RateSource
from hillinfer_bench.decode.request import BenchRequest
from hillinfer_bench.decode.room import PlanNeeds, why_no_model
from hillinfer_bench.figures.bench_figures import bench_figures
from hillinfer_bench.figures.canvas import require_matplotlib, save_figure
from hillinfer_bench.quality.forced_reading import Prefix, compute_threads
from hillinfer_bench.quality.texts import TextSample, standard_library_samples
from hillinfer_bench.report.bench_report import bench_report, table_text, write_bench_report
from hillinfer_bench.report.kinds import MachineKind
from hillinfer_bench.report.report_check import report_faults
from hillinfer_bench.report.rows import BenchRow
from hillinfer_bench.systems.case import (
    MODELLED,
    REAL,
    BenchSetting,
    Case,
    case_setting,
    table_type,
)
from hillinfer_bench.systems.kv_source import LastQueries, PrefixKV, PromptQueries, RandomKV
from hillinfer_bench.systems.replayed_selections import SelectionRecorder
from hillinfer_bench.systems.shapes import SHAPES
from hillinfer_bench.systems.system import BenchError
from hillinfer_bench.systems.table import JOINED, make_system

# Of the real text, shown to systems that weigh the prompt's attention: a group.
OBSERVED_QUERIES = 64

Stage = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def run(
    request: BenchRequest,
    say: Callable[[str], None],
    stage: Stage,
    open_rates: Callable[[Path], RateProbe] = RateProbe,
) -> str:
    """Measure a plan, write report and pictures and return the table.

    Parameters
    ----------
    request
        What to measure.
    say
        Called with one line before each step that takes time.
    stage
        Shows progress: called with a name and a total of steps, gives a function that takes the
        steps done so far.
    open_rates
        Measures memory and the drive, given a directory on it.

    Where it ends before the plan does, the report has what was measured until then.

    Raises
    ------
    HillInferError
        Whatever a user can act on, before weights are loaded where it can be known before.
    """
    check_outside(
        (
            ("--out", request.out),
            ("--trace", request.trace),
        ),
        (("--model", local_model(request.model)),),
    )
    require_matplotlib()
    prepare_report(request.out, "--out")
    plan = make_plan(request.plan, request.model).only(request.chosen)
    for case in plan.cases:
        for name in case.systems:
            make_system(name)
    if request.trace is not None:
        check_one_traced(plan.cases)
        prepare_report(request.trace, "--trace", "the trace")
    outline = ModelOutline.read(ModelSource.locate(request.model, say), request.number_type)
    real = [case for case in plan.cases if case.model == request.model]
    lengths = [case.context + case.all_steps for case in real]
    lengths += [joined_tokens(case) for case in plan.joined if case.model == request.model]
    recorded = plan.recorded + max((case.all_steps for case in plan.cases), default=0)
    needed = max([recorded, *lengths])
    if needed > outline.shape.max_positions:
        raise SettingsError(
            f"{needed} tokens are longer than the {outline.shape.max_positions} positions of "
            f"{request.model}: give a smaller --contexts or --steps, or another --model"
        )
    cold_dir = prepared_cold_dir(request.cold_dir)
    dtype = table_type(request.number_type)
    say(PlanNeeds.of(plan.every, request.model, outline, dtype, cold_dir).text())
    threads = request.threads or ProcessorFacts.read().cores
    sample = standard_library_samples(outline.tokenizer, needed)[0]
    with compute_threads(threads):
        say("measuring memory and drive")
        with open_rates(cold_dir) as rates:
            parts = (outline.load(), sample, plan.recorded, cold_dir, rates, stage)
            bench = _Bench(request, *parts)
            facts = _facts(request, cold_dir, threads, outline.dtype)
            rows: list[BenchRow] = []
            try:
                for row in chain(bench.rows(plan.cases, say), bench.rows(plan.joined, say)):
                    rows.append(row)
            finally:
                # Hours of it may lie behind an error or an interrupt.
                report = bench_report(rows, facts, rates.start, bench.checks, request.out)
                write_bench_report(request.out, report)
    # A step of joined caches is none of a case's systems.
    drawn = [row for row in rows if row.part != JOINED_PART]
    for name, figure in bench_figures(drawn, report["beta"]).items():
        picture = request.out.with_name(f"{request.out.stem}-{name}.png")
        save_figure(figure, picture)
    say(f"report and pictures: {request.out}")
    if request.trace is not None:
        say(f"trace: {request.trace}")
    table = table_text(rows, report)
    faults = report_faults(report)
    if faults:
        say(table)
        raise BenchError(f"{request.out} is written, but wrong: " + "; ".join(faults))
    return table


@dataclass
class _Bench:
    """The parts that all cases of a run share."""

    request: BenchRequest
    loaded: LoadedModel
    sample: TextSample
    recorded: int
    cold_dir: Path
    rates: RateSource
    stage: Stage

    def __post_init__(self) -> None:
        self._recorders: dict[int, SelectionRecorder] = {}
        self._texts: dict[int, PrefixKV] = {}

    @property
    def checks(self) -> list[dict[str, Any]]:
        """How local the stretched selections were."""
        return [one for recorder in self._recorders.values() for one in recorder.checks]

    def rows(self, cases: Sequence[Case], say: Callable[[str], None]) -> Iterator[BenchRow]:
        """Measure all cases; those of a model after another share it."""
        for name, grouped in groupby(cases, key=lambda case: case.model):
            own = list(grouped)
            if name == self.request.model:
                yield from self._measure(self.loaded.model, own, say)
                continue
            shape = SHAPES[name]
            dtype = table_type(self.request.number_type)
            reason = why_no_model(shape.layer_weights * shape.layers * dtype.itemsize * 2)
            if reason is not None:
                for case in own:
                    yield from self._skipped(case, reason)
                continue
            say(f"making {name} with random weights")
            positions = max(joined_tokens(case) for case in own)
            yield from self._measure(shape.build(positions, dtype), own, say)
            gc.collect()

    def _measure(
        self, model: Any, cases: Sequence[Case], say: Callable[[str], None]
    ) -> Iterator[BenchRow]:
        for case in cases:
            say(case.name)
            try:
                if case.systems == (JOINED,):
                    bed = self._joined_bed(model, case)
                    with self.stage(case.model, joined_steps(case)) as advance:
                        yield from measure_joined(bed, self.rates, advance)
                    continue
                bed = self._bed(model, case)
                total = (len(case.systems) + 1) * case.all_steps
                with attached(model), self.stage(case.model, total) as advance:
                    yield from measure_case(bed, self.rates, advance)
            except HillInferError as error:
                yield from self._skipped(case, str(error))

    def _setting(self, model: Any, case: Case, trace: Path | None) -> BenchSetting:
        shape = self.loaded.shape if case.model == self.request.model else None
        positions = model.config.max_position_embeddings
        return case_setting(case, model, shape, positions, self.cold_dir, trace)

    def _weight_bytes(self, model: Any, case: Case, layers: int) -> int:
        """Return the bytes of weights that a step of a model reads."""
        if case.model == self.request.model:
            return int(sum(one.numel() for one in model.parameters()) * model.dtype.itemsize)
        return int(SHAPES[case.model].layer_weights * layers * model.dtype.itemsize)

    def _joined_bed(self, model: Any, case: Case) -> Bed:
        """Return what joined caches stand on; each selects by itself, random weights too."""
        setting = self._setting(model, case, None)
        weights = self._weight_bytes(model, case, setting.shape.layers)
        real = case.model == self.request.model
        source = self._text(case) if real else RandomKV(setting.shape, case.context, case.batch)
        return Bed(setting, setting.all_layers, weights, source, None)

    def _bed(self, model: Any, case: Case) -> Bed:
        setting = self._setting(model, case, self.request.trace)
        shape, all_layers = setting.shape, setting.all_layers
        weights = self._weight_bytes(model, case, shape.layers)
        if case.model == self.request.model:
            if case.batch != 1:
                raise SettingsError(f"batch={case.batch}: the real text is one sequence")
            return Bed(setting, all_layers, weights, self._text(case), self._next_ids(case))
        recorder = self._recorder(case)
        given = case.context, case.all_steps, shape.layers, case.batch
        if any(make_system(name).codes for name in case.systems):
            default = Settings()
            exact = max(default.exact_share, default.exact_floor / case.context)
            selections = recorder.ranked_selections(case.settings(), exact, *given)
        else:
            selections = recorder.selections(case.settings(), *given)
        source = RandomKV(shape, case.context, case.batch)
        return Bed(replace(setting, selections=selections), all_layers, weights, source, None)

    def _recorder(self, case: Case) -> SelectionRecorder:
        """Return who records what a case replays: a recording is never longer than the context."""
        tokens = min(self.recorded, case.context)
        if tokens not in self._recorders:
            self._recorders[tokens] = SelectionRecorder(self.loaded, self.sample, tokens)
        return self._recorders[tokens]

    def _text(self, case: Case) -> PrefixKV:
        if case.context not in self._texts:
            # The one before may be as large.
            self._texts = {}
            self._texts[case.context] = read_text(
                self.loaded.model, self.sample.token_ids, case.context
            )
        return self._texts[case.context]

    def _next_ids(self, case: Case) -> Sequence[int]:
        first = case.context + 1
        return self.sample.token_ids[first : first + case.all_steps]

    def _skipped(self, case: Case, reason: str) -> Iterator[BenchRow]:
        real = case.model == self.request.model
        layers = self.loaded.shape.layers if real else SHAPES[case.model].layers
        all_layers = layers if real else SHAPES[case.model].all_layers
        dtype = str(table_type(self.request.number_type)).removeprefix("torch.")
        for system in case.systems:
            yield replace(
                blank_row(case, system, dtype, layers, all_layers),
                selection=REAL if real else MODELLED,
                skipped=reason,
            )


def read_text(model: Any, token_ids: tuple[int, ...], context: int) -> PrefixKV:
    """Let a model read the first tokens of a text and keep what systems are given of it."""
    with PromptQueries(model, OBSERVED_QUERIES) as queries:
        prefix = Prefix.read(model, token_ids[:context])
    last = None
    if queries.layers:
        last = LastQueries(
            queries.layers, [queries.scaling(layer) for layer in range(len(queries.layers))]
        )
    return PrefixKV(prefix, token_ids, last)


def attached(model: Any) -> Attachment:
    """Attach to a model so that every cache that wants predicted queries gets them."""
    try:
        return Attachment(model, Settings(query=QuerySource.PREDICTED))
    except SettingsError:
        # Nothing predicts for this family, and no system is given a prediction.
        return Attachment(model, Settings())


def _facts(
    request: BenchRequest, cold_dir: Path, threads: int, number_type: torch.dtype
) -> dict[str, Any]:
    """Return what a repetition of the run needs."""
    packages = {one.name: one.version for one in run_packages() if one.version is not None}
    drive = DriveFacts.probe(cold_dir)
    return {
        "plan": request.plan,
        "real_model": request.model,
        "threads": threads,
        **MachineKind.here(number_type).as_record(),
        "filesystem": drive.filesystem,
        "io_mode": drive.io_mode.value,
        "versions": {"python": python_version(), **packages},
    }
