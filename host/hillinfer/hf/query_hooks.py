# SPDX-License-Identifier: Apache-2.0
"""Tells caches what the next layer will ask for, while a layer begins."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hillinfer.hf.attached_cache import AttachedCache
from hillinfer.hf.model_hook import ModelHook
from hillinfer.hf.predictors.query_predictor import QueryPredictor

# Layer 0's input is nothing like layer 1's, so layer 1 takes its true query like layer 0.
FIRST_PREDICTED = 2


class QueryHooks:
    """Hooks on decoder layers that predict the query of the layer behind each (APP).

    Parameters
    ----------
    model
        A decoder-only transformers model.
    predictor
        Of its family.
    """

    def __init__(self, model: PreTrainedModel, predictor: QueryPredictor) -> None:
        layers = list(model.get_decoder().layers)
        self._hooks = [
            layers[number - 1].register_forward_pre_hook(
                _Announce(predictor, number, layers[number]), with_kwargs=True
            )
            for number in range(FIRST_PREDICTED, len(layers))
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Announce(ModelHook):
    def __init__(self, predictor: QueryPredictor, number: int, following: Any) -> None:
        self._predictor = predictor
        self._number = number
        self._following = following

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # As in the attention function, which says why.
        if torch.compiler.is_dynamo_compiling():
            self._left_out(module, args, kwargs)
            return
        cache = kwargs.get("past_key_values")
        hidden = args[0] if args else kwargs["hidden_states"]
        # Only a forward of a single token selects.
        if not isinstance(cache, AttachedCache) or hidden.shape[1] != 1:
            return
        if not cache.takes_predictions:
            return
        following, predictor = self._following, self._predictor
        query = predictor.predict(following, hidden, kwargs.get("position_embeddings"))
        with cache.spans.announce():
            cache.announce(self._number, query, predictor.scaling(following))

    _left_out = torch.compiler.disable(__call__)  # type: ignore[no-untyped-call]
