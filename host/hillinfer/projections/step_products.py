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
from hillinfer.projections.ways import FEW_ROWS_TYPES, FewRowsLayers


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
        # What the first of them computes for all, and each behind it for itself.
        self._known = [_Known(layers, variant)]
        self._known += [_Known([one], variant) for one in layers[1:]]
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def computed(self, place: int, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs of one layer."""
        kept = self._kept
        if place and kept is not None and kept[0] is states:
            self._kept = None
            return kept[1]
        is_step = states.dim() < 3 or states.shape[-2] == 1
        layers = self._known[place].described() if is_step else None
        if layers is None or torch.is_grad_enabled() or not layers.takes(states):
            own = self._layers[place]
            return linear(states, own.weight, own.bias)
        first, *others = layers.outputs(states)
        if others:
            self._kept = states, others[0]
        return first


class _Known:
    """Layers as they were when they were last described: somebody may give one other weights."""

    def __init__(self, layers: Sequence[torch.nn.Linear], variant: int) -> None:
        # Looked up once, because a module's attributes take time: its own dict, not a copy.
        self._parameters = [one._parameters for one in layers]
        self._layers = layers
        self._variant = variant
        # Assigned together: other threads look, too.
        self._known: tuple[list[_Seen], FewRowsLayers | None] = [], None

    def described(self) -> FewRowsLayers | None:
        """Return them as they are now; None where the library does not take them."""
        seen, described = self._known
        if self._are(seen):
            return described
        weights = [(one.weight, one.bias) for one in self._layers]
        first = weights[0][0]
        fits = all(
            is_plain(*one) and one[0].dtype is first.dtype and one[0].shape[1] == first.shape[1]
            for one in weights
        )
        described = FewRowsLayers(weights, self._variant) if fits else None
        flat = [one for both in weights for one in both if one is not None]
        self._known = [(one, one.data_ptr(), one.shape, one.dtype) for one in flat], described
        return described

    def _are(self, seen: list[_Seen]) -> bool:
        place = 0
        for own in self._parameters:
            for one in own.values():
                if one is None:
                    continue
                if place == len(seen):
                    return False
                known, address, shape, dtype = seen[place]
                if one is not known or one.data_ptr() != address or one.shape != shape:
                    return False
                if one.dtype is not dtype or not one.is_contiguous():
                    return False
                place += 1
        return place == len(seen) and place > 0


# A weight or bias, where its numbers lie, and of which shape and type these are.
_Seen = tuple[torch.Tensor, int, torch.Size, torch.dtype]
