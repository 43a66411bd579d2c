# SPDX-License-Identifier: Apache-2.0
"""What tells the cases of a picture from each other, in few words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from hillinfer_bench.decode.row import BenchRow

# Everything but the model that a row's case has; formats keep different values different.
FIELDS: Mapping[str, Callable[[BenchRow], str]] = MappingProxyType(
    {
        "context": lambda row: f"{row.context:,} tokens",
        "batch": lambda row: f"batch {row.batch}",
        "alpha": lambda row: f"α {row.alpha:.12g}",
        "budget_share": lambda row: f"budget {100 * row.budget_share:.12g}%",
        "shadow": lambda row: f"shadow {row.shadow}",
        "type": lambda row: row.type,
        "part": lambda row: row.part,
    }
)


def case_labels(rows: Sequence[BenchRow]) -> tuple[str, dict[tuple[object, ...], str]]:
    """Return what all cases of one model share, and what each has of its own, by case."""
    texts = {row.case: {name: text(row) for name, text in FIELDS.items()} for row in rows}
    own = [name for name in FIELDS if len({text[name] for text in texts.values()}) > 1]
    # A group of bars without a word below it looks like a fault.
    own = own or ["context"]
    first = next(iter(texts.values()))
    common = ", ".join(text for name, text in first.items() if name not in own and text)
    return common, {
        case: "\n".join(text[name] for name in own if text[name]) for case, text in texts.items()
    }


def model_title(row: BenchRow) -> str:
    """Return the model, how much of it was measured, and where selections come from."""
    part = "" if row.layers == row.all_layers else f", {row.layers} of {row.all_layers} layers"
    return f"{short_model(row.model)}{part}, {row.selection}"


def short_model(model: str) -> str:
    """Return a model's name without folders."""
    return model.rstrip("/").split("/")[-1]


def file_words(models: Sequence[str]) -> dict[str, str]:
    """Return a word for each model that file names can have, different for different models."""
    words: dict[str, str] = {}
    for model in models:
        plain = word = re.sub(r"[^\w.-]+", "-", short_model(model)).strip(".-") or "model"
        number = 1
        while word in words.values():
            number += 1
            word = f"{plain}-{number}"
        words[model] = word
    return words
