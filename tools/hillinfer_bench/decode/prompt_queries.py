# SPDX-License-Identifier: Apache-2.0
"""The last queries of a prompt, kept while a model reads it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from hillinfer.errors import SettingsError
from hillinfer.hf.predictors.query_predictor import QueryPredictor
from hillinfer.hf.predictors.table import predictor_of
from hillinfer.query_source import QuerySource


class PromptQueries:
    """Every layer's queries of the last tokens that a model read; a context manager of hooks.

    A layer's query is made of the layer's own input, as its attention makes it.

    Parameters
    ----------
    model
        A decoder-only transformers model.
    most
        Tokens whose queries are kept.

    Attributes
    ----------
    layers
        Of each layer, (batch, query_heads, tokens, head_dim); empty where nothing is known of the
        model's family.
    """

    def __init__(self, model: PreTrainedModel, most: int) -> None:
        self._model = model
        self._most = most
        self._hooks: list[Any] = []
        self._predictor = _predictor(model)
        self.layers: list[torch.Tensor] = []

    def scaling(self, layer: int) -> float:
        """Return the factor on a layer's inner products."""
        assert self._predictor is not None
        return self._predictor.scaling(self._model.get_decoder().layers[layer])

    def __enter__(self) -> PromptQueries:
        if self._predictor is not None:
            layers = list(self._model.get_decoder().layers)
            self.layers = [torch.empty(0)] * len(layers)
            self._hooks = [
                layer.register_forward_pre_hook(self._hook(number), with_kwargs=True)
                for number, layer in enumerate(layers)
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int) -> Any:
        predictor = self._predictor
        assert predictor is not None

        @torch.no_grad()
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = (args[0] if args else kwargs["hidden_states"])[:, -self._most :]
            rotary = kwargs.get("position_embeddings")
            if rotary is not None:
                rotary = tuple(part[:, -self._most :] for part in rotary)
            query = predictor.predict(module, hidden, rotary)
            earlier = self.layers[number]
            if earlier.numel():
                query = torch.cat([earlier, query], 2)
            self.layers[number] = query[:, :, -self._most :].clone()

        return keep


def _predictor(model: PreTrainedModel) -> QueryPredictor | None:
    try:
        return predictor_of(model.config.model_type, QuerySource.PREDICTED)
    except SettingsError:
        return None
