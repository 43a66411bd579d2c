# SPDX-License-Identifier: Apache-2.0
"""Puts a way of computing linear layers on a model and takes it off."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.hf.features import TESTED_FAMILIES
from hillinfer.projections.ways import PackedLinear, ProjectionWay, Restores

# --- Layers that share an input ---

# Called in this order by the modeling code of every family that is supported, on one tensor.
_SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_TYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class LayerGroup:
    """Linear layers of one parent that are called on the same tensor, in this order.

    Names are as in the model; there is one at least.
    """

    names: tuple[str, ...]
    layers: tuple[torch.nn.Linear, ...]

    @classmethod
    def of_model(cls, model: Any) -> list[LayerGroup]:
        """Return every linear layer of a model in exactly one group, checked.

        Raises UnsupportedFeatureError for families that were not looked at, and for layers that are
        not plain.
        """
        groups = cls.of_outline(model)
        for group in groups:
            for name, layer in zip(group.names, group.layers, strict=True):
                _check(name, layer)
        return groups

    @classmethod
    def of_outline(cls, model: Any) -> list[LayerGroup]:
        """Return the groups of a model whose weights need no memory yet; see `of_model`."""
        family = model.config.model_type
        if family not in TESTED_FAMILIES:
            raise UnsupportedFeatureError(
                f"projections work on {', '.join(TESTED_FAMILIES)} models and this is {family}: "
                "use projections='stock'"
            )
        groups = []
        for path, parent in model.named_modules():
            children = dict(parent.named_children())
            for names in _SHARING:
                if all(name in children for name in names):
                    groups.append(cls._of(path, {one: children.pop(one) for one in names}))
            for name, child in children.items():
                if isinstance(child, torch.nn.Linear):
                    groups.append(cls._of(path, {name: child}))
        return groups

    @classmethod
    def _of(cls, path: str, children: dict[str, Any]) -> LayerGroup:
        names = tuple(f"{path}.{name}".lstrip(".") for name in children)
        return cls(names, tuple(children.values()))

    def joined_weight(self) -> torch.Tensor:
        """Return (outputs of all layers, inputs): new memory where there are several layers."""
        weights = [layer.weight.detach() for layer in self.layers]
        return torch.cat(weights) if len(weights) > 1 else weights[0].contiguous()

    def joined_bias(self) -> torch.Tensor | None:
        """Return (outputs of all layers,), zero for a layer without one; None where none has."""
        if all(layer.bias is None for layer in self.layers):
            return None
        return torch.cat(
            [
                layer.weight.new_zeros(layer.out_features)
                if layer.bias is None
                else layer.bias.detach()
                for layer in self.layers
            ]
        )


def _check(name: str, layer: Any) -> None:
    """Refuse what is not torch's own linear layer on the CPU with its own forward function."""
    if type(layer) is not torch.nn.Linear:
        raise UnsupportedFeatureError(
            f"projections: {name} is a {type(layer).__name__} and no plain linear layer (adapters, "
            "quantised weights): merge adapters first, or use projections='stock'"
        )
    if "forward" in vars(layer):
        raise UnsupportedFeatureError(
            f"projections: {name} has a forward function of its own already: detach what put it "
            "there first"
        )
    if layer.weight.device.type != "cpu":
        raise UnsupportedFeatureError(
            f"projections: {name} lies on {layer.weight.device} and packing is for the CPU: use "
            "projections='stock'"
        )
    if layer.weight.dtype not in _TYPES:
        raise UnsupportedFeatureError(
            f"projections: {name} is {str(layer.weight.dtype)[6:]}: load the model in float32 or "
            "bfloat16, or use projections='stock'"
        )


# --- Memory of packed weights ---

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class PackingBytes:
    """Bytes beside the model's weights.

    `held` in the end, as `ProjectionAttachment.held_bytes` will say; `most` at once: while one
    matrix after the other is packed, or rounded weights are widened for the many rows of a prompt.
    """

    held: int
    most: int

    @classmethod
    def of(cls, outline: Any, way: ProjectionWay, item_bytes: int) -> PackingBytes:
        """Add up what a way takes on a model.

        `outline` is a model of transformers whose weights need shapes and no memory; `item_bytes`
        is of the type that it will compute in. Raises UnsupportedFeatureError for families whose
        layers cannot be packed.
        """
        if type(way).pack is ProjectionWay.pack:
            return cls(0, 0)
        uses = Counter(
            id(one) for module in outline.modules() for one in module.parameters(recurse=False)
        )
        held = most = largest = 0
        for group in LayerGroup.of_outline(outline):
            if len(group.layers) < way.least_layers:
                continue
            outputs = sum(layer.out_features for layer in group.layers)
            items = outputs * group.layers[0].in_features
            bias = 0 if all(layer.bias is None for layer in group.layers) else outputs
            own = way.held_bytes(outputs, group.layers[0].in_features, bias, item_bytes)
            joined = items * item_bytes if len(group.layers) > 1 else 0
            copies = way.packing_copies * items * _FLOAT32_BYTES
            most = max(most, held + own + joined + copies)
            largest = max(largest, items)
            held += own
            if way.restores is Restores.FROM_COPY:
                held -= item_bytes * sum(
                    layer.weight.numel() for layer in group.layers if uses[id(layer.weight)] == 1
                )
        widened = largest * _FLOAT32_BYTES if way.restores is Restores.NOTHING else 0
        return cls(held, max(most, held + widened))


# --- One product for several layers ---

Forward = Callable[[torch.Tensor], torch.Tensor]


class SharedProduct:
    """Computes when the first layer of a group is called and hands the others their parts.

    A later layer takes its part only for the very tensor that the first one got, in the same
    thread; for any other it computes for itself. What was computed is let go with the last part.
    `packed` computes all layers' outputs, one after the other along the last dimension, of which
    each layer has so many as `outputs` says.
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


# --- Attaching ---


class ProjectionAttachment:
    """Packed projections on one model; a context manager that takes them off at the end.

    Independent of HillInfer's own attachment: either goes on and off first. The model's modules
    stay as they are; their forward functions are covered. Weights that the packing can give back
    bit for bit and that no other module uses are let go meanwhile: they have a shape and no
    memory (torch's meta device), so a model with projections cannot be saved or moved.

    The model is one of transformers, causal, on the CPU and in evaluation mode. Raises
    UnsupportedFeatureError where model, machine or weights cannot be packed; the model is then as
    it was.

    Attributes
    ----------
    steps
        To be entered for each decode step: what the way computes in steps alone.
    """

    def __init__(self, model: Any, way: ProjectionWay) -> None:
        self._way = way
        self.steps = way.in_steps(model)
        self._covered: list[tuple[LayerGroup, PackedLinear]] = []
        # The model's own parameters, empty meanwhile.
        self._let_go: dict[torch.nn.Linear, torch.nn.Parameter] = {}
        self._let_go_bytes = 0
        if type(way).pack is ProjectionWay.pack:
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

    def __exit__(self, *ended: object) -> None:
        self.detach()

    @torch.no_grad()
    def _cover(self, group: LayerGroup, uses: Counter[int]) -> None:
        packed = self._way.pack(group.joined_weight(), group.joined_bias())
        if packed is None:
            return
        self._covered.append((group, packed))
        outputs = [layer.out_features for layer in group.layers]
        if self._way.restores is Restores.FROM_SHARED_MEMORY:
            for layer, part in zip(
                group.layers, torch.split(packed.plain_weight(), outputs), strict=True
            ):
                layer.weight.data = part
        elif self._way.restores is Restores.FROM_COPY:
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
        if self._way.restores is Restores.NOTHING:
            return
        outputs = [layer.out_features for layer in group.layers]
        for layer, part in zip(
            group.layers, torch.split(packed.plain_weight(), outputs), strict=True
        ):
            own = self._let_go.pop(layer, None)
            if own is not None:
                own.data = part.clone()
                layer.weight = own
            elif self._way.restores is Restores.FROM_SHARED_MEMORY and len(outputs) > 1:
                # Memory of its own again: the joined matrix is let go. One layer's never moved.
                layer.weight.data = part.clone()
