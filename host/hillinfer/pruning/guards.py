# SPDX-License-Identifier: Apache-2.0
"""Wrappers around `generate` and decoder layers of a model that prunes its prompts."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hillinfer.errors import HillInferWarning, SettingsError, UnsupportedFeatureError
from hillinfer.hf.features import NAME, Guard
from hillinfer.hf.hooks import QueryPredictor, named, predictor_of
from hillinfer.hf.joined_cache import JoinedCache
from hillinfer.pruning.passes import ComingPrompt, Document, coming_prompt
from hillinfer.pruning.schedule import Schedule
from hillinfer.settings import QuerySource

if TYPE_CHECKING:
    from hillinfer.pruning.reading import Pruning


class PromptGuard(Guard):
    """Wraps `generate`, which alone knows how long a prompt is that it cuts into chunks."""

    _name = "generate"

    def __init__(self, model: PreTrainedModel, schedule: Schedule) -> None:
        self._schedule = schedule
        super().__init__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; forward passes learn how many tokens the prompt has.

        Raises UnsupportedFeatureError where tokens are to be taken back at every step.
        """
        given = named(self._guarded, args, kwargs)
        for name in ("assistant_model", "prompt_lookup_num_tokens"):
            if given.get(name) is not None:
                raise UnsupportedFeatureError(
                    f"prune: {name} asks for logits of tokens that are dropped: call generate "
                    "without it"
                )
        ids, mask = given.get("input_ids", given.get("inputs")), given.get("attention_mask")
        if coming_prompt.get() is not None or not isinstance(ids, torch.Tensor):
            return self._guarded(*args, **kwargs)
        # Ids may be those of new tokens alone; the mask then covers all.
        of_mask = mask.shape[-1] if isinstance(mask, torch.Tensor) else 0
        tokens = max(ids.shape[1], of_mask)
        if isinstance(given.get("past_key_values"), JoinedCache) and self._schedule.prunes(tokens):
            raise UnsupportedFeatureError(
                "prune: a prompt is read in stages into a DynamicCache, or a cache of new_cache(), "
                "not a JoinedCache: read it into the cache itself, without prune where it is joined"
            )
        token = coming_prompt.set(ComingPrompt(tokens))
        try:
            return self._guarded(*args, **kwargs)
        finally:
            coming_prompt.reset(token)


class LayerGuard(Guard):
    """Wraps a decoder layer's `forward`."""

    _name = "forward"

    def __init__(self, pruning: Pruning, number: int, layer: nn.Module) -> None:
        self._pruning, self._number = pruning, number
        super().__init__(layer)

    @property
    def parameters(self) -> frozenset[str]:
        """The names of what the layer takes."""
        return frozenset(inspect.signature(self._guarded).parameters)

    def dense(self, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
        """Do what the layer does."""
        return self._guarded(hidden, **given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take hidden states through the layer as far as they go."""
        given = named(self._guarded, args, kwargs)
        hidden = given.pop("hidden_states")
        return self._pruning.run(self._number, self, hidden, given)


def warn_of_pieces(document: Document, before: int, tokens: int) -> None:
    """Say that a pass may be a part of the prompt that was taken for all of it.

    Parameters
    ----------
    document
        What is known of the cache, of a prompt whose length nobody said.
    before, tokens
        What the cache holds, and how many come.
    """
    if document.is_new and document.length == before and tokens > 1:
        warnings.warn(
            f"prune: {tokens} tokens come right behind a prompt of {before} that was read in "
            "stages, and meet what it kept: where both are one prompt, say so with "
            "pruning.prompt(tokens) around its passes",
            HillInferWarning,
            stacklevel=2,
        )


def check_outputs(config: Any, given: dict[str, Any]) -> None:
    """Refuse a pass in stages that is to tell what each layer made of all tokens.

    Parameters
    ----------
    config
        Of the model; layers are not told where a call takes back what it says.
    given
        What the pass gives to layers.

    Raises
    ------
    UnsupportedFeatureError
        Where hidden states or attention weights are asked for.
    """
    for name in ("output_hidden_states", "output_attentions"):
        if given.get(name) or getattr(config, name, False):
            raise UnsupportedFeatureError(
                f"prune: {name}=True asks for all tokens in every layer, and deeper layers see "
                "fewer: read the prompt without it, or without prune"
            )


def predictor_for(model: PreTrainedModel) -> QueryPredictor:
    """Return what makes queries of a model's layers; refuse what cannot be read in stages."""
    kind = model.config._attn_implementation
    if kind not in ("sdpa", "eager", NAME):
        raise UnsupportedFeatureError(
            f"prune: the model's attention is {kind!r}, and each band needs a mask of its own: "
            "call model.set_attn_implementation('sdpa')"
        )
    if any(
        isinstance(one.__dict__.get("forward"), LayerGuard) for one in model.get_decoder().layers
    ):
        raise UnsupportedFeatureError(
            "prune: the model is pruned already: end that one with .remove() first"
        )
    try:
        predictor = predictor_of(model.config.model_type, QuerySource.PREDICTED)
    except SettingsError as error:
        raise SettingsError(
            f"prune: nothing makes the queries of {model.config.model_type} models: take one of "
            "Llama, Mistral, Qwen2, Qwen3 or OPT"
        ) from error
    assert predictor is not None
    return predictor
