# SPDX-License-Identifier: Apache-2.0
"""Which linear layers of a model share an input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.hf.features import TESTED_FAMILIES

# Called in this order by the modeling code of every family that is supported, on one tensor.
_SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_TYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class LayerGroup:
    """Linear layers of one parent that are called on the same tensor, in this order.

    Parameters
    ----------
    names
        As in the model.
    layers
        At least one.
    """

    names: tuple[str, ...]
    layers: tuple[torch.nn.Linear, ...]

    @classmethod
    def of_model(cls, model: Any) -> list[LayerGroup]:
        """Return every linear layer of a model in exactly one group, checked.

        Raises
        ------
        UnsupportedFeatureError
            For families that were not looked at, and for layers that are not plain.
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
