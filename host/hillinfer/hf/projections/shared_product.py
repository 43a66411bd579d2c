# SPDX-License-Identifier: Apache-2.0
"""One product for several layers that are called one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.hf.projections.projection_way import PackedLinear

Forward = Callable[[torch.Tensor], torch.Tensor]


class SharedProduct:
    """Computes when the first layer of a group is called and hands the others their parts.

    A later layer takes its part only for the very tensor that the first one got, in the same
    thread; for any other it computes for itself. What was computed is let go with the last part.

    Parameters
    ----------
    packed
        Computes all layers' outputs, one after the other along the last dimension.
    outputs
        Number of outputs of each layer.
    """

    def __init__(self, packed: PackedLinear, outputs: Sequence[int]) -> None:
        self.packed = packed
        self._outputs = list(outputs)
        self._last = threading.local()

    def forwards(self) -> list[Forward]:
        """Return the forward function of each layer, in order."""
        if len(self._outputs) == 1:
            return [self._only]
        return [self._first, *(self._later(place) for place in range(1, len(self._outputs)))]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _only(self, states: torch.Tensor) -> torch.Tensor:
        return self._computed(states)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _first(self, states: torch.Tensor) -> torch.Tensor:
        parts = self._parts(states)
        self._last.states, self._last.parts = states, parts
        return parts[0]

    def _later(self, place: int) -> Forward:
        is_last = place == len(self._outputs) - 1

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(states: torch.Tensor) -> torch.Tensor:
            if getattr(self._last, "states", None) is not states:
                return self._parts(states)[place]
            part: torch.Tensor = self._last.parts[place]
            if is_last:
                self._last.states = self._last.parts = None
            return part

        covered: Forward = forward
        return covered

    def _parts(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(self._computed(states), self._outputs, dim=-1)

    def _computed(self, states: torch.Tensor) -> torch.Tensor:
        if states.requires_grad and torch.is_grad_enabled():
            raise UnsupportedFeatureError(
                "packed projections have no gradients: compute under torch.no_grad(), or detach "
                "them first"
            )
        return self.packed(states)
