# SPDX-License-Identifier: Apache-2.0
"""Documents of the tasks as the harness takes them: tables of the library `datasets`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Dataset

from hillinfer.harness.tasks import made_texts


def _table(make: Callable[..., made_texts.Splits]) -> Callable[..., dict[str, Any]]:
    def tables(**options: Any) -> dict[str, Any]:
        return {split: Dataset.from_list(found) for split, found in make(**options).items()}

    return tables


needles = _table(made_texts.needles)
lines = _table(made_texts.lines)
choices = _table(made_texts.choices)
pages = _table(made_texts.pages)
