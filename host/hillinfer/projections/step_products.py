# SPDX-License-Identifier: Apache-2.0
"""A model's linear layers in decode steps, and as they are in all other passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.native.library import native_library
from hillinfer.projections.attachment import Forward, LayerGroup
from hillinfer.projections.few_rows import few_rows_of_each, is_few


class StepProducts:
    """Computes linear layers by the native library in steps of one or few sequences alone.

    Entered for a step, which covers the layers' forward functions; outside the model is as it was,
    so that a store finds the rows of the same model. It may be entered again within itself, and in
    one thread at a time. A model whose layers are not plain ones in float32 on the CPU stays as it
    is in steps, too, and so does one with packed projections.

    Parameters
    ----------
    model
        One of transformers.
    """

    def __init__(self, model: Any) -> None:
        variant = native_library().variants[0].number
        self._covers: list[tuple[dict[str, Any], Forward]] = []
        try:
            groups = LayerGroup.of_model(model)
        except UnsupportedFeatureError:
            return
        for group in groups:
            plain = [one for one in group.layers if is_plain(one)]
            shared = _SharedInput(plain, variant)
            for place, layer in enumerate(plain):
                self._covers.append((vars(layer), partial(shared.computed, place)))

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


def is_plain(layer: torch.nn.Linear) -> bool:
    """Return whether a layer's weights are what `few_rows` takes."""
    weight, bias = layer.weight, layer.bias
    return (
        weight.dtype is torch.float32
        and weight.is_contiguous()
        and (bias is None or (bias.dtype is torch.float32 and bias.is_contiguous()))
    )


class _SharedInput:
    """Layers that take the same input: where the first one computes, the others have their parts.

    A later one takes its part only for the very tensor that the first one got, and once.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear], variant: int) -> None:
        self._layers = list(layers)
        self._variant = variant
        self._states: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = []

    def computed(self, place: int, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs of one layer."""
        if place and self._states is states:
            part, self._parts[place] = self._parts[place], None
            if place == len(self._layers) - 1:
                self._states = None
            if part is not None:
                return part
        layer = self._layers[place]
        # Somebody may have given a layer other weights meanwhile.
        wanted = [layer] if place else self._layers
        if not (is_few(states, layer.in_features) and all(map(is_plain, wanted))):
            return linear(states, layer.weight, layer.bias)
        weights = [(one.weight, one.bias) for one in wanted]
        first, *others = few_rows_of_each(states, weights, self._variant)
        if others:
            self._states, self._parts = states, [None, *others]
        return first
