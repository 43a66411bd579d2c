# SPDX-License-Identifier: Apache-2.0
"""Refuses models that would give wrong answers, before anything is computed."""

from __future__ import annotations

import re
from importlib.metadata import version

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hillinfer.errors import UnsupportedFeatureError

TESTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")
TRANSFORMERS_WINDOW = ((5, 23), (5, 24))


def check_versions() -> None:
    """Refuse a transformers outside the window whose internals were checked."""
    found = version("transformers")
    low, high = TRANSFORMERS_WINDOW
    if not low <= tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < high:
        raise UnsupportedFeatureError(
            f"transformers {found} is outside the tested window {low[0]}.{low[1]} up to, not "
            f"including, {high[0]}.{high[1]}: pip install 'transformers~={low[0]}.{low[1]}.0'"
        )


def check_model(model: PreTrainedModel) -> None:
    """Refuse architectures whose attention is not plain causal attention over all tokens.

    Raises
    ------
    UnsupportedFeatureError
        Naming the feature and the way out.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedFeatureError(
            f"{type(model).__name__} is no transformers model: attach what "
            "AutoModelForCausalLM.from_pretrained returns, before torch.compile"
        )
    config = model.config
    kind = f"{config.model_type} models"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedFeatureError(
            f"{kind} are encoder-decoders: HillInfer works with decoder-only models"
        )
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedFeatureError(
            f"{kind} take more than text (images, sound), whose tokens have no ids to tell prompts "
            "apart: use a text model, or the ordinary cache"
        )
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedFeatureError(
            f"{kind} use latent attention (MLA), whose keys and values have no heads to score: "
            "use the ordinary cache"
        )
    layers = DynamicCache(config=config).layers
    foreign = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if foreign:
        way_out = (
            ", or set config.sliding_window = None if the context fits the window"
            if {type(layer) for layer in layers} == {DynamicSlidingWindowLayer}
            else ""
        )
        raise UnsupportedFeatureError(
            f"this {config.model_type} model has layers of other kinds ({', '.join(foreign)}: "
            f"sliding, chunked, linear or shared attention): use the ordinary cache{way_out}"
        )


def check_uses_interface(model: PreTrainedModel, name: str) -> None:
    """Refuse a model that did not take the attention function it was given.

    Raises
    ------
    UnsupportedFeatureError
        For models with attention code of their own, such as ALiBi models.
    """
    if model.config._attn_implementation != name:
        raise UnsupportedFeatureError(
            f"{model.config.model_type} models do not use transformers' attention interface (ALiBi "
            "and older architectures): use the ordinary cache"
        )
