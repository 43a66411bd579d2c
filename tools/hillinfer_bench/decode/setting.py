# SPDX-License-Identifier: Apache-2.0
"""What every system of one case is opened with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hillinfer.model_shape import ModelShape
from hillinfer.pools.budget_plan import staging_bytes
from hillinfer_bench.decode.case import Case
from hillinfer_bench.decode.selections import Selections
from hillinfer_model.choices import KeyMode


@dataclass(frozen=True)
class BenchSetting:
    """A model that HillInfer is attached to, and what its caches may take.

    Parameters
    ----------
    case
        What is measured.
    model
        A causal language model of transformers, attached.
    shape
        Of its KV cache.
    budget_bytes
        M0 of all systems that keep one.
    cold_dir
        Existing directory on the drive.
    selections
        What systems that select are made to select; None where they choose by themselves.
    all_layers
        Layers of the whole model, where `shape` has only some of them; 0 where it has all.
    trace
        File that HillInfer's own system writes its lanes to; None for none.
    """

    case: Case
    model: Any
    shape: ModelShape
    budget_bytes: int
    cold_dir: Path
    selections: Selections | None
    all_layers: int = 0
    trace: Path | None = None

    @property
    def whole(self) -> BenchSetting:
        """The same with all layers, and their budget: what a user of the model would plan."""
        layers = self.all_layers or self.shape.layers
        if layers == self.shape.layers:
            return self
        shape = replace(self.shape, layers=layers)
        return replace(self, shape=shape, budget_bytes=budget_bytes(self.case, shape, layers))

    @property
    def tokens(self) -> int:
        """Tokens of each sequence at the end."""
        return self.case.context + self.case.all_steps

    @property
    def kv_bytes(self) -> int:
        """Rows of all sequences at the end."""
        return self.tokens * self.case.batch * self.shape.token_bytes


def budget_bytes(case: Case, shape: ModelShape, all_layers: int) -> int:
    """Return M0 in bytes, the same for every system.

    Where only some layers of a model are built, they get their part of what the whole model's
    budget leaves beside HillInfer's staging, and the staging, which a model has once.

    Parameters
    ----------
    case
        Names the share.
    shape
        Of the layers that are built.
    all_layers
        Layers of the whole model.
    """
    rows = (case.context + case.all_steps) * case.batch
    whole = int(case.budget_share * rows * all_layers * shape.row_bytes)
    staging = staging_bytes(shape, replace(case.settings(), shadow=KeyMode.INT4))
    if all_layers == shape.layers or whole <= staging:
        return int(case.budget_share * rows * shape.token_bytes)
    return staging + (whole - staging) * shape.layers // all_layers
