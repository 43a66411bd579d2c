# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench quality`, from the model to the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hillinfer.doctor.finding import python_version, run_packages
from hillinfer.errors import SettingsError
from hillinfer.models.loader import LoadedModel, ModelOutline
from hillinfer.models.sources import ModelSource, local_model
from hillinfer.system.files import check_outside, prepare_report
from hillinfer.system.machine import ProcessorFacts
from hillinfer_bench.quality.forced_reading import Prefix, compute_threads, forced_logits, selecting
from hillinfer_bench.quality.table import (
    FULL_CACHE,
    Configuration,
    Measures,
    QualityRow,
    measure,
    table_configurations,
    table_text,
    write_report,
)
from hillinfer_bench.quality.texts import TextSample, TextsRequest
from hillinfer_bench.report.kinds import MachineKind


def evaluate_text(
    model: Any,
    sample: TextSample,
    last: int,
    configurations: Sequence[Configuration],
    threads: int = 1,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[Measures]:
    """Measure the full cache and every configuration on the last tokens of one text.

    All but the last tokens are read densely, once; then the last ones are read by each
    configuration in one forward pass, each token with its own selected set.

    Parameters
    ----------
    model
        A causal language model of transformers, in evaluation mode.
    sample
        The text.
    last
        L, tokens read sparsely.
    configurations
        What to measure.
    threads
        For reading the prefix, and configurations measured at once, each on one thread.
    on_progress
        Called with the number of configurations done, the full cache first.

    Returns
    -------
    Measures of the full cache, then of each configuration.

    Raises
    ------
    SettingsError
        Where `last` leaves nothing to be read densely.
    """
    context = len(sample.token_ids) - 1
    if not 0 < last < context:
        raise SettingsError(f"last={last} must be at least 1 and below the context of {context}")
    next_ids = sample.token_ids[context - last + 1 :]
    forced_ids = sample.token_ids[context - last : context]
    with compute_threads(threads):
        prefix = Prefix.read(model, sample.token_ids[: context - last])
    # Scoring is thousands of small operations, which one thread each serves better than many.
    with compute_threads(1), selecting(model), ThreadPoolExecutor(threads) as workers:
        full = forced_logits(model, prefix, forced_ids, None)
        measured = [measure(full, full, next_ids)]
        on_progress(1)

        def one(configuration: Configuration) -> Measures:
            policy = configuration.policy(prefix.shape)
            return measure(forced_logits(model, prefix, forced_ids, policy), full, next_ids)

        for result in workers.map(one, configurations):
            measured.append(result)
            on_progress(len(measured))
    return measured


Stage = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Evaluated:
    """What was measured of every text.

    Parameters
    ----------
    loaded
        The model.
    facts
        `run_facts` of the run.
    full
        Of the full cache, for each text.
    others
        Of each configuration, likewise.
    """

    loaded: LoadedModel
    facts: dict[str, Any]
    full: tuple[Measures, ...]
    others: list[tuple[Measures, ...]]


def evaluate_texts(
    request: TextsRequest,
    configurations: Sequence[Configuration],
    say: Callable[[str], None],
    stage: Stage,
) -> Evaluated:
    """Measure configurations on every text of a request.

    Parameters
    ----------
    request
        Model, texts and where the report goes.
    configurations
        What is compared with the full cache.
    say, stage
        As of `run`.

    Raises
    ------
    HillInferError
        Whatever a user can act on, before weights are loaded where it can be known before.
    """
    check_outside((("--out", request.out),), (("--model", local_model(request.model)),))
    if request.out is not None:
        prepare_report(request.out, "--out")
    outline = ModelOutline.read(ModelSource.locate(request.model, say), request.number_type)
    samples = request.samples(outline.tokenizer, outline.shape.max_positions)
    loaded = outline.load()
    threads = request.threads or ProcessorFacts.read().cores
    measured = []
    for sample in samples:
        with stage(sample.name, (1 + len(configurations)) * request.last) as advance:
            on_progress = partial(_advance_by, advance, request.last)
            measured.append(
                evaluate_text(
                    loaded.model, sample, request.last, configurations, threads, on_progress
                )
            )
    full, *others = (tuple(column) for column in zip(*measured, strict=True))
    return Evaluated(loaded, run_facts(request, loaded, samples, threads), full, others)


def run(request: TextsRequest, say: Callable[[str], None], stage: Stage) -> str:
    """Measure every configuration on every text and return the table.

    Parameters
    ----------
    request
        What to measure.
    say
        Called with one line before each step that takes time.
    stage
        Shows progress: called with a name and a total in tokens, gives a function that takes the
        tokens done so far.

    Raises
    ------
    HillInferError
        Whatever a user can act on, before weights are loaded where it can be known before.
    """
    configurations = table_configurations(request.alphas)
    evaluated = evaluate_texts(request, configurations, say, stage)
    full = evaluated.full
    rows = [QualityRow(FULL_CACHE, 1.0, full, full)]
    rows += [
        QualityRow(configuration.name, configuration.settings.importance_rate, measures, full)
        for configuration, measures in zip(configurations, evaluated.others, strict=True)
    ]
    if request.out is not None:
        write_report(request.out, rows, evaluated.facts)
    return table_text(rows)


def _advance_by(advance: Callable[[int], None], tokens: int, passes: int) -> None:
    advance(passes * tokens)


def run_facts(
    request: TextsRequest, loaded: LoadedModel, samples: Sequence[TextSample], threads: int
) -> dict[str, Any]:
    """Return what a repetition of a run over texts needs."""
    packages = {one.name: one.version for one in run_packages() if one.version is not None}
    kind = MachineKind.here(loaded.model.dtype)
    return {
        "model": loaded.name,
        "dtype": kind.number_type,
        "stored_type": loaded.shape.stored_type.value,
        "texts": [sample.name for sample in samples],
        "context": request.context,
        "last": request.last,
        "threads": threads,
        **kind.as_record(),
        "versions": {"python": python_version(), **packages},
    }
