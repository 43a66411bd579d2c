# SPDX-License-Identifier: Apache-2.0
"""What packed projections will take, known before weights are loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hillinfer.hf.projections.layer_group import LayerGroup
from hillinfer.hf.projections.projection_way import ProjectionWay, Restores

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class PackingBytes:
    """Bytes beside the model's weights.

    Parameters
    ----------
    held
        In the end, as `ProjectionAttachment.held_bytes` will say.
    most
        At once: while one matrix after the other is packed, or rounded weights are widened for the
        many rows of a prompt.
    """

    held: int
    most: int

    @classmethod
    def of(cls, outline: Any, way: ProjectionWay, item_bytes: int) -> PackingBytes:
        """Add up what a way takes on a model.

        Parameters
        ----------
        outline
            A model of transformers; its weights need shapes, and no memory.
        way
            How linear layers will be computed.
        item_bytes
            Of the type that the model will compute in.

        Raises
        ------
        UnsupportedFeatureError
            For families whose layers cannot be packed.
        """
        if type(way) is ProjectionWay:
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
