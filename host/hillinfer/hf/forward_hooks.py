# SPDX-License-Identifier: Apache-2.0
"""Tells caches that a forward pass of an attached model begins and ends."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.hf import attention
from hillinfer.hf.attached_cache import AttachedCache
from hillinfer.hf.attached_name import NAME
from hillinfer.hf.model_hook import ModelHook
from hillinfer.hf.turns import Use, forward_frame


class ForwardHooks:
    """The hooks of a whole model.

    Parameters
    ----------
    model
        A decoder-only transformers model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._hooks = [
            model.register_forward_pre_hook(_Before(), with_kwargs=True),
            model.register_forward_hook(_After(), with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


class _Before(ModelHook):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        arguments = _named(module, args, kwargs)
        cache = arguments.get("past_key_values")
        if not isinstance(cache, AttachedCache):
            return
        _check_arguments(module, arguments)
        cache.check_dtype(cast(PreTrainedModel, module).dtype)
        use = Use(forward_frame())
        cache.begin_forward(arguments["input_ids"], arguments.get("attention_mask"), use)
        attention.begin_own(use)
        cache.check_positions(arguments.get("position_ids"))


class _After(ModelHook):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        cache = _named(module, args, kwargs).get("past_key_values")
        if not isinstance(cache, AttachedCache):
            return
        # Nothing comes out of a forward pass that raised; the cache then forgets what it brought.
        if output is not None:
            attention.end_own()
            cache.end_forward()
            return
        use = attention.own_use()
        # This hook is called for a pass that was refused at its beginning, too.
        if use is not None and use.is_of(forward_frame()):
            use.end()


def _check_arguments(module: Any, arguments: dict[str, Any]) -> None:
    """Refuse arguments, and states of a model, that a pass with a cache of ours cannot have."""
    if module.training:
        raise UnsupportedFeatureError(
            "the model is in training mode, which drops or changes its cache: call model.eval()"
        )
    if module.config._attn_implementation != NAME:
        raise CacheUseError(
            f"the model's attention was set to {module.config._attn_implementation!r} while "
            f"HillInfer is attached, which then attends to nothing: call "
            f"model.set_attn_implementation({NAME!r}), or detach, set it, and attach again"
        )
    wanted = arguments.get("output_attentions")
    if getattr(module.config, "output_attentions", False) if wanted is None else wanted:
        attention.refuse_arguments({"output_attentions": True})
    if arguments.get("use_cache") is False:
        raise UnsupportedFeatureError(
            "use_cache=False: all tokens would come again at every step and be stored again; leave "
            "it out, or leave past_key_values out"
        )
    if arguments.get("input_ids") is None:
        raise UnsupportedFeatureError(
            "inputs_embeds: the cache keeps token ids to tell prompts apart; pass input_ids"
        )
    check_ids(arguments["input_ids"])


def check_ids(ids: Any) -> None:
    """Refuse what are no token ids (batch, tokens), and none at all."""
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        found = f"shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise CacheUseError(
            f"input_ids must be a tensor of (batch, tokens), not {found}: take what "
            "tokenizer(texts, return_tensors='pt') gives"
        )
    if not ids.numel():
        raise CacheUseError(
            f"the prompt is empty (input_ids of shape {tuple(ids.shape)}): pass at least one token"
        )


def _named(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a forward pass by name."""
    if not args:
        return kwargs
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
