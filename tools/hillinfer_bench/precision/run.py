# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench precision`, from the model to the table."""

from __future__ import annotations

from collections.abc import Callable

from hillinfer.errors import SettingsError
from hillinfer.generate.run_report import json_bytes
from hillinfer.system.files import cannot_write, write_whole
from hillinfer_bench.precision.table import PrecisionRow, precision_table, study_mixes
from hillinfer_bench.quality.run import Stage, evaluate_texts
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
    mixes = [mix for number, mix in enumerate(study) if not rows_of or number in rows_of]
    configurations = [mix.configuration() for mix in mixes]
    evaluated = evaluate_texts(request, configurations, say, stage)
    shape = evaluated.loaded.shape
    rows = [
        PrecisionRow(
            mix,
            QualityRow(configuration.name, mix.alpha, measures, evaluated.full),
            mix.byte_share(request.context, shape.head_dim),
        )
        for mix, configuration, measures in zip(
            mixes, configurations, evaluated.others, strict=True
        )
    ]
    if request.out is not None:
        record = {
            "label": "measured",
            **evaluated.facts,
            "rows": [row.as_record() for row in rows],
        }
        try:
            write_whole(request.out, json_bytes(record))
        except OSError as error:
            raise cannot_write(request.out, error, "--out") from error
    return precision_table(rows)
