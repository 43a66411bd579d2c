# SPDX-License-Identifier: Apache-2.0
"""Puts a way of computing linear layers on a model and takes it off."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

import torch

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.hf.projections.layer_group import LayerGroup
from hillinfer.hf.projections.projection_way import PackedLinear, ProjectionWay, Restores
from hillinfer.hf.projections.shared_product import SharedProduct


class ProjectionAttachment:
    """Packed projections on one model; a context manager that takes them off at the end.

    Independent of HillInfer's own attachment: either goes on and off first. The model's modules
    stay as they are; their forward functions are covered. Weights that the packing can give back
    bit for bit and that no other module uses are let go meanwhile: they have a shape and no
    memory (torch's meta device), so a model with projections cannot be saved or moved.

    Parameters
    ----------
    model
        A causal language model of transformers on the CPU, in evaluation mode.
    way
        How linear layers are computed.

    Raises
    ------
    UnsupportedFeatureError
        Where model, machine or weights cannot be packed; the model is then as it was.
    """

    def __init__(self, model: Any, way: ProjectionWay) -> None:
        self._way = way
        self._covered: list[tuple[LayerGroup, PackedLinear]] = []
        # The model's own parameters, empty meanwhile.
        self._let_go: dict[torch.nn.Linear, torch.nn.Parameter] = {}
        self._let_go_bytes = 0
        if type(way) is ProjectionWay:
            return
        if model.training:
            raise UnsupportedFeatureError(
                "packed projections have no gradients and the model is in training mode: call "
                "model.eval()"
            )
        groups = LayerGroup.of_model(model)
        uses = Counter(
            id(one) for module in model.modules() for one in module.parameters(recurse=False)
        )
        try:
            for group in groups:
                if len(group.layers) >= way.least_layers:
                    self._cover(group, uses)
        except BaseException:
            self.detach()
            raise

    @property
    def held_bytes(self) -> int:
        """Bytes that packing holds more than the model alone did; 0 where weights only moved."""
        return sum(packed.held_bytes for _, packed in self._covered) - self._let_go_bytes

    def detach(self) -> None:
        """Leave the model as it was, bit for bit; harmless when done twice."""
        while self._covered:
            group, packed = self._covered.pop()
            for layer in group.layers:
                vars(layer).pop("forward", None)
            self._give_back(group, packed)
        self._let_go_bytes = 0

    def __enter__(self) -> ProjectionAttachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    @torch.no_grad()
    def _cover(self, group: LayerGroup, uses: Counter[int]) -> None:
        packed = self._way.pack(group.joined_weight(), group.joined_bias())
        if packed is None:
            return
        self._covered.append((group, packed))
        outputs = [layer.out_features for layer in group.layers]
        if packed.restores is Restores.FROM_SHARED_MEMORY:
            for layer, part in zip(
                group.layers, torch.split(packed.plain_weight(), outputs), strict=True
            ):
                layer.weight.data = part
        elif packed.restores is Restores.FROM_COPY:
            for layer in group.layers:
                if uses[id(layer.weight)] == 1:
                    self._let_go_weight(layer)
        forwards = SharedProduct(packed, outputs).forwards()
        for layer, forward in zip(group.layers, forwards, strict=True):
            vars(layer)["forward"] = forward

    def _let_go_weight(self, layer: torch.nn.Linear) -> None:
        own: Any = layer.weight
        self._let_go[layer] = own
        self._let_go_bytes += own.nbytes
        layer.weight = torch.nn.Parameter(
            torch.empty_like(own, device="meta"), requires_grad=own.requires_grad
        )
        own.data = own.data.new_empty(0)

    @torch.no_grad()
    def _give_back(self, group: LayerGroup, packed: PackedLinear) -> None:
        if packed.restores is Restores.NOTHING:
            return
        outputs = [layer.out_features for layer in group.layers]
        for layer, part in zip(
            group.layers, torch.split(packed.plain_weight(), outputs), strict=True
        ):
            own = self._let_go.pop(layer, None)
            if own is not None:
                own.data = part.clone()
                layer.weight = own
            elif packed.restores is Restores.FROM_SHARED_MEMORY:
                # Memory of its own again: the joined matrix is let go.
                layer.weight.data = part.clone()
