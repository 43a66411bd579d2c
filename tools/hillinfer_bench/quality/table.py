# SPDX-License-Identifier: Apache-2.0
"""The quality table: its configurations, measures and report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from hillinfer.devices.opening import make_scorer
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.generate.run_report import json_bytes
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.system.files import cannot_write, write_whole
from hillinfer_bench.quality.policies import (
    Attending,
    ContractSelection,
    FloatWeights,
    Pages,
    RecentOnly,
    SelectionPolicy,
)
from hillinfer_model.choices import KeyMode, Rule, Scope


@dataclass(frozen=True)
class Measures:
    """Means over the last tokens of one text.

    Parameters
    ----------
    negative_log_likelihood
        Of the text's own next tokens, in nats; its exponential is the perplexity.
    kl_divergence
        KL(full cache ‖ this configuration) of the next-token distributions, in nats.
    agreement
        Share of steps whose most probable token is the full cache's.
    """

    negative_log_likelihood: float
    kl_divergence: float
    agreement: float


def measure(logits: torch.Tensor, full_logits: torch.Tensor, next_ids: Sequence[int]) -> Measures:
    """Compare a configuration with the full cache.

    Parameters
    ----------
    logits, full_logits
        float32 of shape (tokens, vocabulary).
    next_ids
        The text's own token after each of them.
    """
    log_probabilities = torch.log_softmax(logits.double(), dim=-1)
    full = torch.log_softmax(full_logits.double(), dim=-1)
    own = log_probabilities.gather(1, torch.tensor(list(next_ids))[:, None])
    divergence = (full.exp() * (full - log_probabilities)).sum(-1)
    agreement = logits.argmax(-1) == full_logits.argmax(-1)
    return Measures(
        negative_log_likelihood=-float(own.mean()),
        kl_divergence=float(divergence.mean()),
        agreement=float(agreement.double().mean()),
    )


_SHADOWS = (KeyMode.INT8, KeyMode.INT4, KeyMode.INT2)


@dataclass(frozen=True)
class Configuration:
    """One way to select tokens.

    Parameters
    ----------
    name
        As the table shows it.
    make
        Returns the policy for a model's shape and some settings.
    settings
        α and whatever the policy reads.
    """

    name: str
    make: Callable[[ModelShape, Settings], SelectionPolicy | Attending]
    settings: Settings

    def policy(self, shape: ModelShape) -> SelectionPolicy | Attending:
        """Return the policy."""
        return self.make(shape, self.settings)


def contract_configuration(settings: Settings) -> Configuration:
    """Return the product's own selection under some settings."""
    name = f"{settings.rule.value} {settings.key_mode.value.upper()}"
    if settings.scope is not Scope.LAYER:
        name += f" {settings.scope.value}"
    return Configuration(name, _contract, settings)


def table_configurations(alphas: Sequence[float]) -> list[Configuration]:
    """Return the rows of the default table: each α with every rule, shadow and comparison."""
    rows = []
    for alpha in alphas:
        settings = Settings().changed(alpha=alpha)
        rows.append(Configuration("float weights (ideal)", _float_weights, settings))
        rows += [
            contract_configuration(settings.changed(rule=rule, shadow=shadow))
            for rule in Rule
            for shadow in _SHADOWS
        ]
        rows.append(Configuration("pages of 16", _pages, settings))
        rows.append(Configuration("recent only", _recent_only, settings))
    return rows


def _contract(shape: ModelShape, settings: Settings) -> SelectionPolicy:
    scorer = make_scorer(settings.device, kernel_spec(shape, settings), settings.scope)
    return ContractSelection(scorer, settings)


def _float_weights(shape: ModelShape, settings: Settings) -> SelectionPolicy:
    return FloatWeights(settings)


def _pages(shape: ModelShape, settings: Settings) -> SelectionPolicy:
    return Pages(settings)


def _recent_only(shape: ModelShape, settings: Settings) -> SelectionPolicy:
    return RecentOnly(settings)


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
