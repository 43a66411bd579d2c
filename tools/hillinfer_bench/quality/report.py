# SPDX-License-Identifier: Apache-2.0
"""The quality table, for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hillinfer.output_file import cannot_write, write_whole
from hillinfer.run_report import json_bytes
from hillinfer_bench.quality.measures import Measures

FULL_CACHE = "full cache"
_NAME_COLUMN = 1


@dataclass(frozen=True)
class QualityRow:
    """One configuration over all texts.

    Parameters
    ----------
    name
        The configuration's, `FULL_CACHE` for the full cache.
    alpha
        Importance rate, 1.0 for the full cache.
    measures, full
        One per text: this configuration's and the full cache's.
    """

    name: str
    alpha: float
    measures: tuple[Measures, ...]
    full: tuple[Measures, ...]

    @property
    def perplexity(self) -> float:
        """Of the last tokens of all texts together."""
        return math.exp(fmean(one.negative_log_likelihood for one in self.measures))

    @property
    def perplexity_against_full(self) -> float:
        """Perplexity over the full cache's, minus 1."""
        full = math.exp(fmean(one.negative_log_likelihood for one in self.full))
        return self.perplexity / full - 1

    @property
    def kl_divergence(self) -> float:
        """Mean over texts, in nats."""
        return fmean(one.kl_divergence for one in self.measures)

    @property
    def kl_standard_error(self) -> float:
        """Standard error of that mean over texts; NaN for a single text."""
        if len(self.measures) < 2:
            return math.nan
        spread = stdev(one.kl_divergence for one in self.measures)
        return spread / math.sqrt(len(self.measures))

    @property
    def agreement(self) -> float:
        """Mean over texts."""
        return fmean(one.agreement for one in self.measures)


def table_text(rows: Sequence[QualityRow]) -> str:
    """Return the table as Markdown with its columns aligned."""
    cells = [
        ["α", "configuration", "perplexity", "against full", "KL", "± s.e.", "agreement"],
        *(
            [
                f"{row.alpha:g}",
                row.name,
                f"{row.perplexity:.3f}",
                f"{row.perplexity_against_full:+.2%}",
                f"{row.kl_divergence:.4f}",
                f"{row.kl_standard_error:.4f}",
                f"{row.agreement:.3f}",
            ]
            for row in rows
        ),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["| " + " | ".join(_aligned(line, widths)) + " |" for line in cells]
    rule = ["-" * (width - 1) + ":" for width in widths]
    rule[_NAME_COLUMN] = "-" * widths[_NAME_COLUMN]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        text.ljust(width) if column == _NAME_COLUMN else text.rjust(width)
        for column, (text, width) in enumerate(zip(line, widths, strict=True))
    ]


def write_report(file: Path, rows: Sequence[QualityRow], facts: dict[str, Any]) -> None:
    """Write the table with what it was measured on as JSON.

    Parameters
    ----------
    file
        Where to.
    rows
        The table.
    facts
        Model, texts, machine and options.

    Raises
    ------
    ReportError
        Where the file cannot be written.
    """
    record = {
        "label": "measured",
        **facts,
        "rows": [
            {
                "configuration": row.name,
                "alpha": row.alpha,
                "perplexity": row.perplexity,
                "perplexity_against_full": row.perplexity_against_full,
                "kl_divergence": row.kl_divergence,
                "agreement": row.agreement,
                "texts": [asdict(one) for one in row.measures],
            }
            for row in rows
        ],
    }
    try:
        write_whole(file, json_bytes(record))
    except OSError as error:
        raise cannot_write(file, error, "--out") from error
