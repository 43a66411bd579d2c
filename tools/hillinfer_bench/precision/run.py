# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench precision`, from the model to the table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hillinfer.errors import SettingsError
from hillinfer.generate.run_report import json_bytes
from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource, local_model
from hillinfer.system.files import cannot_write, check_outside, prepare_report, write_whole
from hillinfer.system.machine import ProcessorFacts
from hillinfer_bench.precision.table import PrecisionRow, precision_table, study_mixes
from hillinfer_bench.quality.run import Stage, evaluate_text, run_facts
from hillinfer_bench.quality.table import QualityRow
from hillinfer_bench.quality.texts import TextsRequest


def run(
    request: TextsRequest, rows_of: frozenset[int], say: Callable[[str], None], stage: Stage
) -> str:
    """Measure rows of the study on every text and return the table.

    Parameters
    ----------
    request
        Model, texts and where the report goes; its α are not used.
    rows_of
        Numbers of the rows that are measured, from 0; all where empty.
    say, stage
        As of `hillinfer_bench.quality.run.run`.

    Raises
    ------
    HillInferError
        Whatever a user can act on, before weights are loaded where it can be known before.
    """
    study = study_mixes()
    for number in sorted(rows_of):
        if not 0 <= number < len(study):
            raise SettingsError(f"row={number} is none of the study's 0 to {len(study) - 1}")
    check_outside((("--out", request.out),), (("--model", local_model(request.model)),))
    if request.out is not None:
        prepare_report(request.out, "--out")
    outline = ModelOutline.read(ModelSource.locate(request.model, say), request.number_type)
    samples = request.samples(outline.tokenizer, outline.shape.max_positions)
    loaded = outline.load()
    threads = request.threads or ProcessorFacts.read().cores
    mixes = [mix for number, mix in enumerate(study) if not rows_of or number in rows_of]
    configurations = [mix.configuration() for mix in mixes]
    measured = []
    for sample in samples:
        with stage(sample.name, (1 + len(mixes)) * request.last) as advance:
            on_progress = partial(_advance_by, advance, request.last)
            measured.append(
                evaluate_text(
                    loaded.model, sample, request.last, configurations, threads, on_progress
                )
            )
    full, *others = (tuple(column) for column in zip(*measured, strict=True))
    rows = [
        PrecisionRow(
            mix,
            QualityRow(configuration.name, mix.alpha, measures, full),
            mix.byte_share(request.context, loaded.shape.head_dim),
        )
        for mix, configuration, measures in zip(mixes, configurations, others, strict=True)
    ]
    if request.out is not None:
        record = {
            "label": "measured",
            **run_facts(request, loaded, samples, threads),
            "rows": [row.as_record() for row in rows],
        }
        try:
            write_whole(request.out, json_bytes(record))
        except OSError as error:
            raise cannot_write(request.out, error, "--out") from error
    return precision_table(rows)


def _advance_by(advance: Callable[[int], None], tokens: int, passes: int) -> None:
    advance(passes * tokens)
