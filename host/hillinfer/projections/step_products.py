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
from hillinfer.projections.few_rows import FEW_ROWS_TYPES, few_rows_of_each, is_few


class StepProducts:
    """Computes linear layers by the native library in steps of one or few sequences alone.

    Entered for a step, which covers the layers' forward functions; outside the model is as it was,
    so that a store finds the rows of the same model. It may be entered again within itself. A model
    whose layers are not plain ones in float32 or bfloat16 on the CPU stays as it is in steps, too,
    and so do passes of several tokens of a sequence, those that gradients go through, and layers
    that somebody else has covered.

    Parameters
    ----------
    model
        One of transformers.
    """

    def __init__(self, model: Any) -> None:
        variant = native_library().variants[0].number
        self._covers: list[tuple[dict[str, Any], Forward]] = []
        # Of each time that it was entered, what is uncovered behind it.
        self._entered: list[list[dict[str, Any]]] = []
        try:
            groups = LayerGroup.of_model(model)
        except UnsupportedFeatureError:
            return
        for group in groups:
            plain = [one for one in group.layers if is_plain(one.weight, one.bias)]
            # Of query, key and value the first is asked for alone, too: queries are predicted.
            for layers in (*([one] for one in plain[:-2]), plain[-2:]):
                shared = _SharedInput(layers, variant)
                for place, layer in enumerate(layers):
                    self._covers.append((vars(layer), partial(shared.computed, place)))

    @property
    def layers(self) -> int:
        """How many layers are computed so."""
        return len(self._covers)

    def __enter__(self) -> None:
        own: list[dict[str, Any]] = []
        self._entered.append(own)
        for names, forward in self._covers:
            if "forward" not in names:
                own.append(names)
                names["forward"] = forward

    def __exit__(self, *ended: object) -> None:
        for names in self._entered.pop():
            names.pop("forward", None)


def is_plain(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether a layer's weights are what `few_rows` takes."""
    if weight.dtype not in FEW_ROWS_TYPES or not (weight.is_cpu and weight.is_contiguous()):
        return False
    if bias is None:
        return True
    return bias.dtype is weight.dtype and bias.is_cpu and bias.is_contiguous()


class _SharedInput:
    """One layer, or two that take the same input: the first computes, and the other has its part.

    It takes that only for the very tensor that the first one got, and once. Threads may use it at
    once: each that does not find its own part computes.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear], variant: int) -> None:
        self._layers = list(layers)
        self._variant = variant
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def computed(self, place: int, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs of one layer."""
        kept = self._kept
        if place and kept is not None and kept[0] is states:
            self._kept = None
            return kept[1]
        # Looked up once, because each look takes time, and every time, because somebody may have
        # given a layer others meanwhile.
        wanted = self._layers[place : place + 1] if place else self._layers
        weights = [(one.weight, one.bias) for one in wanted]
        weight, bias = weights[0]
        is_step = states.dim() < 3 or states.shape[-2] == 1
        if (
            torch.is_grad_enabled()
            or not (is_step and is_few(states, weight))
            or not all(is_plain(*one) for one in weights)
        ):
            return linear(states, weight, bias)
        first, *others = few_rows_of_each(states, weights, self._variant)
        if others:
            self._kept = states, others[0]
        return first
