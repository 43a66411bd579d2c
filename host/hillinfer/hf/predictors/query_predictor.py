# SPDX-License-Identifier: Apache-2.0
"""What a family of models needs to say how a layer's query is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]


class QueryPredictor(ABC):
    """Makes a layer's query from hidden states that are not its own (HillInfer section 4.3).

    Layers change the hidden states by little each, so those that enter the layer before give
    nearly the query that the layer will make.
    """

    @abstractmethod
    def predict(self, layer: Any, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Return the query that a decoder layer would make of some hidden states.

        Parameters
        ----------
        layer
            A decoder layer of transformers.
        hidden
            (batch, tokens, hidden_size), before the layer's norm.
        rotary
            Cosines and sines of the tokens' positions, None in models without them.

        Returns
        -------
        (batch, query_heads, tokens, head_dim), as attention functions are given it.
        """

    @abstractmethod
    def scaling(self, layer: Any) -> float:
        """Return what the layer's attention multiplies inner products with."""
