# SPDX-License-Identifier: Apache-2.0
"""Which tokens a layer's queries attend to."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.settings import Settings
from hillinfer_bench.policies.layer_queries import LayerQueries
from hillinfer_model.selection import kept_positions, selected_count


class SelectionPolicy(ABC):
    """A way to select tokens, for comparison; subclasses override one method.

    What is the same for every policy lies here: how many tokens are selected and which are kept.
    The product selects by the scoring contract alone (`ContractSelection`).

    Parameters
    ----------
    settings
        α, the kept tokens, the upper bound; a policy may read more of it, such as the scope.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Select tokens for each query of a layer.

        Parameters
        ----------
        layer
            Queries and keys. A policy must not look at keys after a query's own token.

        Returns
        -------
        One int64 array of shape (sets, k) per query: ascending positions, the kept tokens among
        them, k as `count` says; sets is 1, or the KV heads where each has a set of its own.
        """

    def count(self, length: int) -> int:
        """Return k, how many of `length` tokens are selected."""
        settings = self.settings
        return selected_count(length, settings.alpha, settings.kept_tokens, settings.max_selected)

    def kept(self, length: int) -> NDArray[np.int64]:
        """Return the kept tokens of `length`, int64 ascending."""
        return kept_positions(length, self.settings.kept_sinks, self.settings.kept_recent)

    def best(self, scores: torch.Tensor) -> NDArray[np.int64]:
        """Return the kept tokens and the best of the others, for policies that score tokens.

        Parameters
        ----------
        scores
            Floating point, (sets, length), higher is better; ties fall to the lower position.

        Returns
        -------
        int64 of shape (sets, k), ascending.
        """
        length = scores.shape[-1]
        ranked = scores.clone()
        ranked[:, torch.from_numpy(self.kept(length))] = torch.inf
        order = torch.argsort(ranked, dim=-1, descending=True, stable=True)
        return np.sort(order[:, : self.count(length)].numpy(), axis=-1)
