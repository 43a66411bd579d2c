# SPDX-License-Identifier: Apache-2.0
"""What a model's layers must do in a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.hf.forward_plan import ForwardPlan
from hillinfer.model_shape import ModelShape


def check_states(
    plan: ForwardPlan, shape: ModelShape, layer: int, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Refuse keys and values that are not what the config promises.

    Raises
    ------
    UnsupportedFeatureError
        Naming what is wrong with them.
    """
    if keys.requires_grad:
        raise UnsupportedFeatureError(
            "gradients do not pass through a cache on a drive: use torch.no_grad()"
        )
    if keys.shape != values.shape:
        raise UnsupportedFeatureError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in shape "
            "(latent attention): this model needs its ordinary cache"
        )
    expected = (plan.batch, shape.kv_heads, plan.tokens, shape.head_dim)
    if tuple(keys.shape) != expected:
        raise UnsupportedFeatureError(
            f"layer {layer} has keys of shape {tuple(keys.shape)} where the config says "
            f"{expected}: layers of different shapes need the ordinary cache"
        )


def check_attended(plan: ForwardPlan, lengths: Sequence[int], stored: Collection[int]) -> None:
    """Refuse a pass that some layer made without its cache.

    Parameters
    ----------
    plan
        The pass, which is through.
    lengths
        Tokens of each layer.
    stored
        Layers that stored keys and values and did not attend to them.

    Raises
    ------
    CacheUseError
        Naming the first layer.
    """
    for layer, length in enumerate(lengths):
        if length != plan.start + plan.tokens:
            raise CacheUseError(
                f"layer {layer} brought the cache no keys and values: a model that skips layers "
                "needs its ordinary cache"
            )
    if stored:
        raise CacheUseError(
            f"layer {min(stored)} attended without the cache that its keys and values are in, so "
            "its answer is wrong: leave the attention implementation of all layers as "
            "hillinfer.attach set it, or detach first"
        )
