# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench frontier`, from the sweep to report, table and picture."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hillinfer.drive.directories import prepared_cold_dir
from hillinfer.drive.files import ColdFile, probe_io_mode
from hillinfer.engine.budget_plan import BudgetPlan
from hillinfer.errors import SettingsError
from hillinfer.generate.run_report import json_bytes
from hillinfer.models.loader import LoadedModel, ModelOutline
from hillinfer.models.sources import ModelSource, local_model
from hillinfer.system.files import cannot_write, check_outside, prepare_report, write_whole
from hillinfer.system.machine import ProcessorFacts
from hillinfer_bench.decode.measuring import Bed
from hillinfer_bench.decode.rates import RateProbe, RateSource
from hillinfer_bench.decode.room import return_freed_memory
from hillinfer_bench.decode.run import read_text
from hillinfer_bench.figures.canvas import require_matplotlib, save_figure
from hillinfer_bench.figures.frontier_figure import frontier_figure
from hillinfer_bench.frontier.elsewhere import goals_elsewhere
from hillinfer_bench.frontier.equal import EqualQuality, default_row, equal_qualities
from hillinfer_bench.frontier.kept_times import KeptTimes
from hillinfer_bench.frontier.modelled import Machine
from hillinfer_bench.frontier.report import TimedModel, frontier_report, report_text
from hillinfer_bench.frontier.request import FrontierRequest, TimedPlan
from hillinfer_bench.frontier.sweep import (
    Setting,
    SweepRows,
    curves,
    sweep_text,
    swept_rows,
)
from hillinfer_bench.frontier.swept import CODED, HILLINFER, SWEPT, default_alpha, exact_split
from hillinfer_bench.frontier.times import (
    TODAY_ALPHA,
    WHATEVER_KL,
    TimedRow,
    lies_in_memory,
    measure_times,
    parts_of,
    timed_systems,
)
from hillinfer_bench.quality.forced_reading import compute_threads
from hillinfer_bench.quality.run import Stage, run_facts
from hillinfer_bench.quality.texts import TextSample
from hillinfer_bench.systems.case import (
    BenchSetting,
    Case,
    Selections,
    case_setting,
    table_type,
)
from hillinfer_bench.systems.kv_source import RandomKV
from hillinfer_bench.systems.replayed_selections import SelectionRecorder
from hillinfer_bench.systems.shapes import BenchShape
from hillinfer_bench.systems.table import FLOOR

WARM_UP = 4
# Of the real text, after which selections are recorded that shapes replay.
RECORDED = 4096


def run(request: FrontierRequest, say: Callable[[str], None], stage: Stage) -> str:
    """Sweep, take times at equal quality, write report and picture and return the table.

    Parameters
    ----------
    request
        What to measure.
    say
        Called with one line before each step that takes time.
    stage
        Shows progress: called with a name and a total, gives a function that takes what is done.

    Raises
    ------
    HillInferError
        Whatever a user can act on, before weights are loaded where it can be known before.
    """
    texts, plan = request.texts, request.timed
    check_outside((("--out", request.out),), (("--model", local_model(texts.model)),))
    require_matplotlib()
    prepare_report(request.out, "--out")
    outline = ModelOutline.read(ModelSource.locate(texts.model, say), texts.number_type)
    most = outline.shape.max_positions
    samples = texts.samples(outline.tokenizer, most)
    timed_text = _timed_text(request, outline)
    loaded = outline.load()
    threads = texts.threads or ProcessorFacts.read().cores
    facts = run_facts(texts, loaded, samples, threads)
    settings = [
        Setting(SWEPT[name], value) for name in request.names for value in SWEPT[name].values
    ]
    rows = SweepRows(request.rows_file, _measured_on(facts, samples))
    for sample in samples:
        total = len(settings) * texts.last
        with stage(sample.name, total) as advance:
            on_progress = partial(_advance_by, advance, texts.last)
            sweep_text(loaded.model, sample, texts.last, settings, rows, threads, on_progress)
    swept = swept_rows(rows, samples, settings, texts.context, loaded.shape)
    found = curves(swept)
    equal = equal_qualities(default_row(swept), found, plan.kls)
    taken_on = _measured_on(facts, samples) | {"threads": threads}
    # The first is HillInfer's own.
    kept = {
        one.kl if number else None: KeptTimes(
            request.times_file,
            taken_on | {"settings": {name: own.value for name, own in one.crossings.items()}},
            one.kl if number else None,
        )
        for number, one in enumerate(equal)
    }
    timed: list[TimedModel] = []
    try:
        if plan.steps and (plan.real_context or plan.shapes):
            assert timed_text is not None
            cold_dir = prepared_cold_dir(request.cold_dir)
            with compute_threads(threads), RateProbe(cold_dir) as rates:
                recorder = SelectionRecorder(loaded, timed_text, _recorded(plan, most))
                parts = (loaded, timed_text, recorder, rates, equal, stage)
                taking = _Times(request, *parts)
                for model, at_kl in taking.models():
                    why = taking.why_not(at_kl)
                    if why:
                        say(f"no times of {model} at a KL of {at_kl:g}: {CODED}: {why}")
                        continue
                    say(f"taking times of {model}" + (f" at a KL of {at_kl:g}" if at_kl else ""))
                    timed.append(taking.take(model, at_kl))
                    kept[at_kl].add(timed[-1])
    finally:
        # A sweep alone has no times.
        others = [
            other
            for at_kl, own in kept.items()
            if plan.steps
            for other in own.others([one.name for one in timed if one.at_kl == at_kl])
        ]
        for one, when in others:
            say(f"times of {one.title} are of an earlier run ({when})")
        facts = {**facts, "earlier_times": {one.title: when for one, when in others}}
        timed = sorted([*timed, *(one for one, _ in others)], key=lambda one: not one.real)
        elsewhere = goals_elsewhere(request.out.parent, default_alpha())
        report = frontier_report(swept, equal, timed, facts, elsewhere)
        try:
            write_whole(request.out, json_bytes(report))
        except OSError as error:
            raise cannot_write(request.out, error, "--out") from error
    save_figure(frontier_figure(report), request.out.with_suffix(".png"))
    say(f"report and picture: {request.out}")
    return report_text(report)


def _timed_text(request: FrontierRequest, outline: ModelOutline) -> TextSample | None:
    """Return the text whose steps are timed and recorded; None where no times are taken."""
    plan, texts = request.timed, request.texts
    if not plan.steps or not (plan.real_context or plan.shapes):
        return None
    steps = WARM_UP + plan.steps
    most = outline.shape.max_positions
    recorded = _recorded(plan, most) if plan.shapes else 0
    needed = max(plan.real_context, recorded) + steps
    if needed > most:
        raise SettingsError(
            f"{needed} tokens are longer than the {most} positions of {texts.model}: give a "
            "smaller --real-context or --steps"
        )
    return replace(texts, context=needed).samples(outline.tokenizer, most, 1)[0]


def _recorded(plan: TimedPlan, positions: int) -> int:
    """Return the tokens after which selections are recorded, of a model with some positions."""
    return min(RECORDED, plan.shape_context, positions - WARM_UP - plan.steps)


def _measured_on(facts: Mapping[str, Any], samples: Sequence[TextSample]) -> dict[str, Any]:
    """Return what rows of a sweep depend on."""
    names = ("model", "dtype", "stored_type", "context", "last")
    tokens = hashlib.sha256()
    for sample in samples:
        tokens.update(np.array(sample.token_ids, np.int64).tobytes())
    return {**{name: facts[name] for name in names}, "tokens": tokens.hexdigest()}


def _advance_by(advance: Callable[[int], None], tokens: int, settings: int) -> None:
    advance(settings * tokens)


@dataclass(frozen=True)
class _Times:
    """What all timed models of a run share."""

    request: FrontierRequest
    loaded: LoadedModel
    text: TextSample
    recorder: SelectionRecorder
    rates: RateSource
    equal: Sequence[EqualQuality]
    stage: Stage

    def models(self) -> list[tuple[str, float | None]]:
        """Return the names of those that are timed and at which KL, the real one first."""
        plan = self.request.timed
        real = [self.request.texts.model] if plan.real_context else []
        return [
            (name, kl)
            for names, kls in ((real, plan.real_kls), (plan.shapes, plan.shape_kls))
            for name in names
            for kl in (None, *kls)
        ]

    def why_not(self, at_kl: float | None) -> str:
        """Return why no setting of HillInfer has a KL, or nothing."""
        own = self._at(at_kl).crossings.get(CODED)
        return "" if at_kl is None or own is None or own.value is not None else own.why

    def _at(self, kl: float | None) -> EqualQuality:
        return next((one for one in self.equal[1:] if one.kl == kl), self.equal[0])

    def take(self, name: str, at_kl: float | None) -> TimedModel:
        """Take times of one model at a KL; None is HillInfer's own."""
        plan, request = self.request.timed, self.request
        real = name == request.texts.model
        crossings = self._at(at_kl).crossings
        beside = WHATEVER_KL if at_kl is None else ()
        systems = timed_systems(crossings, partial(self._selections, name), *beside)
        told = (
            f"{request.texts.model} at {request.texts.context} tokens with a KL of "
            f"{next(iter(crossings.values())).kl:.2g}"
        )
        parts = parts_of(systems)
        on_drive = [one for one in parts if not lies_in_memory(one)]
        in_memory = [one for one in parts if lies_in_memory(one)]
        case = Case(
            name,
            plan.real_context if real else plan.shape_context,
            (FLOOR,),
            budget_share=plan.real_budget if real else plan.shape_budget,
            # What ranks in the sweep, whatever room there is.
            shadow="int4",
            steps=plan.steps,
            warm_up=WARM_UP,
        )
        of_text = self._real_bed(case) if real else None
        rows: list[TimedRow] = []
        machine: Machine | None = None
        for own, build in ((on_drive, plan.built), (in_memory, plan.built_in_memory)):
            bed = of_text or self._shape_bed(case, build(name))
            for part in own:
                of_part = replace(bed.setting.case, systems=parts[part], part=part)
                setting = replace(bed.setting, case=of_part)
                given = replace(bed, setting=setting), systems, self.rates, self.stage, told
                rows += measure_times(*given)
                del setting, given
                return_freed_memory()
            machine = machine or _machine(bed, rows)
            del bed
            gc.collect()
        return TimedModel(name, real, rows, machine, at_kl)

    def _real_bed(self, case: Case) -> Bed:
        """Return what the model itself is timed on."""
        model, cold_dir = self.loaded.model, prepared_cold_dir(self.request.cold_dir)
        weights = sum(one.numel() for one in model.parameters()) * model.dtype.itemsize
        positions = model.config.max_position_embeddings
        setting = case_setting(case, model, self.loaded.shape, positions, cold_dir)
        first = case.context + 1
        next_ids = self.text.token_ids[first : first + case.all_steps]
        source = read_text(model, self.text.token_ids, case.context)
        return Bed(setting, setting.all_layers, int(weights), source, next_ids)

    def _shape_bed(self, case: Case, built: BenchShape) -> Bed:
        """Return a shape with random weights and rows."""
        dtype = table_type(self.request.timed.shape_type)
        model = built.build(case.context + case.all_steps, dtype)
        cold_dir = prepared_cold_dir(self.request.cold_dir)
        weights = built.layer_weights * built.layers * dtype.itemsize
        positions = model.config.max_position_embeddings
        setting = case_setting(case, model, None, positions, cold_dir, built=built)
        source = RandomKV(setting.shape, case.context, case.batch)
        return Bed(setting, setting.all_layers, int(weights), source, None)

    def _selections(self, name: str, system: str, alpha: float) -> Selections | None:
        """Return what a system on a shape replays at an importance rate; None on the real model."""
        plan, request = self.request.timed, self.request
        if name == request.texts.model:
            return None
        case = Case(name, plan.shape_context, (FLOOR,), alpha=alpha, shadow="int4")
        steps, layers = WARM_UP + plan.steps, plan.built(name).layers
        given = case.context, steps, layers, 1
        if system != CODED:
            return self.recorder.selections(case.settings(), *given)
        split = exact_split()
        exact = max(split.share, split.floor / case.context)
        return self.recorder.ranked_selections(case.settings(), exact, *given)


def _machine(bed: Bed, rows: Sequence[TimedRow]) -> Machine | None:
    """Return what is modelled with: the floor and the rates that rows were limited by."""
    floor = next((one.row for one in rows if one.row.system == FLOOR), None)
    if floor is None or floor.median_ms is None:
        return None
    assert floor.memory_gbps is not None
    assert floor.drive_gbps is not None
    setting = bed.setting
    return Machine(
        floor.model,
        floor.median_ms,
        floor.memory_gbps * 1e9,
        floor.drive_gbps * 1e9,
        setting.kv_bytes,
        setting.budget_bytes / setting.kv_bytes,
        setting.shape,
        _read_unit(setting.cold_dir),
        {name: _beside(setting, alpha, exact) for name, alpha, exact in _OWN},
    )


# HillInfer with coded tokens, and all exact.
_OWN = ((CODED, default_alpha(), exact_split().share), (HILLINFER, TODAY_ALPHA, 1.0))


def _beside(setting: BenchSetting, alpha: float, exact: float) -> float:
    """Return what of M0 holds neither rows nor codes nor what ranks, over all rows."""
    settings = setting.case.settings().changed(alpha=alpha, exact=exact)
    plan = BudgetPlan.with_whole_shadow(setting.shape, settings, setting.tokens)
    ranked = SWEPT[HILLINFER].ranked_share(setting.shape) * plan.kv_bytes
    return max(0.0, plan.required_bytes - ranked) / plan.kv_bytes


def _read_unit(cold_dir: Path) -> int:
    file = ColdFile(cold_dir, probe_io_mode(cold_dir), "nothing")
    try:
        return file.read_unit
    finally:
        file.close()
