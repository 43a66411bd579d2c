# SPDX-License-Identifier: Apache-2.0
"""A model's linear layers in steps of few sequences, and as they are in all other passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.native.library import native_library
from hillinfer.projections.attachment import LayerGroup
from hillinfer.projections.few_rows import few_rows, is_few


class JoinedSteps:
    """Computes a model's linear layers by `few_rows` in steps of one or few sequences alone.

    Entered for a step, which covers the layers' forward functions; outside the model is as it was,
    so that a store finds the rows of the same model. One whose layers are not plain ones in float32
    on the CPU stays as it is in steps, too, and so does one with packed projections.

    Parameters
    ----------
    model
        One of transformers.
    """

    def __init__(self, model: Any) -> None:
        variant = native_library().variants[0].number
        self._covers: list[tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = []
        try:
            groups = LayerGroup.of_model(model)
        except UnsupportedFeatureError:
            return
        for layer in (one for group in groups for one in group.layers):
            if layer.weight.dtype is torch.float32 and layer.weight.is_contiguous():
                self._covers.append((vars(layer), partial(_computed, layer, variant)))

    @property
    def layers(self) -> int:
        """How many layers are computed so."""
        return len(self._covers)

    def __enter__(self) -> None:
        for names, forward in self._covers:
            names["forward"] = forward

    def __exit__(self, *ended: object) -> None:
        for names, _ in self._covers:
            names.pop("forward", None)


def _computed(layer: torch.nn.Linear, variant: int, states: torch.Tensor) -> torch.Tensor:
    # Somebody may have given the layer other weights meanwhile.
    held = [one for one in (layer.weight, layer.bias) if one is not None]
    is_plain = all(one.dtype is torch.float32 and one.is_contiguous() for one in held)
    if is_plain and is_few(states, layer.in_features):
        return few_rows(states, layer.weight, layer.bias, variant)
    return linear(states, layer.weight, layer.bias)
