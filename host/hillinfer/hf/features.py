# SPDX-License-Identifier: Apache-2.0
"""Checks which models are supported, and knows which model a cache was made for."""

from __future__ import annotations

import copy
import functools
import re
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hillinfer.errors import CacheUseError, UnsupportedFeatureError

# --- the attention function's name ---

NAME = "hillinfer"


class AttachedName(str):
    """The name that a config has while its model is attached.

    A copy of the config, also one that is pickled, belongs to a model that is not attached, and
    gets the name that was there before.

    Parameters
    ----------
    previous
        That name.
    """

    previous: str

    def __new__(cls, previous: str) -> AttachedName:
        """Return `NAME`."""
        name = super().__new__(cls, NAME)
        name.previous = previous
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.previous

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.previous,)


# --- an attached model's methods ---


class Guard(ABC):
    """Wraps a method of a model.

    It lies in the model's own attributes. A copy of the model is not attached, and gets what it
    would have without: its own method, with its own weights.

    Parameters
    ----------
    model
        What is attached.

    Attributes
    ----------
    replaced
        What the model's attributes had there before; None where nothing.
    """

    _name: str

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.replaced: Callable[..., Any] | None = model.__dict__.get(self._name)
        self._guarded: Callable[..., Any] = getattr(model, self._name)
        # Not its attributes: where it is a guard, too, those are its own.
        functools.update_wrapper(self, self._guarded, updated=())
        setattr(model, self._name, self)

    def remove(self) -> None:
        """Give the model back what it had; a guard that came later goes on around that."""
        outer = self._model.__dict__.get(self._name)
        while isinstance(outer, Guard) and outer is not self and outer.replaced is not self:
            outer = outer.replaced
        if isinstance(outer, Guard) and outer is not self:
            outer.replaced, outer._guarded = self.replaced, self._guarded
            return
        delattr(self._model, self._name)
        if self.replaced is not None:
            setattr(self._model, self._name, self.replaced)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the method does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.replaced is not None:
            return copy.deepcopy(self.replaced, memo)
        # The copy is there already, and has no attributes yet: this is its class's.
        copied = memo.get(id(self._model))
        return self if copied is None else getattr(copied, self._name)

    def __reduce__(self) -> Any:
        if self.replaced is not None:
            return _itself, (self.replaced,)
        return getattr, (self._model, self._name)


def _itself(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


# --- Why a cache was not told about a forward pass ---


class ModelInUse:
    """What a cache knows of the model it was made for.

    Parameters
    ----------
    model
        Is not kept alive.

    Attributes
    ----------
    attached
        Whether HillInfer is still on it.
    model
        Returns it, while it is there.
    name
        Of the model, for people: its class, and where it is from.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = weakref.ref(model)
        self.attached = True
        self.name = named_model(model)

    @property
    def attached_model(self) -> PreTrainedModel | None:
        """The model, while it is there and HillInfer on it."""
        return self.model() if self.attached else None

    def check_attached(self) -> None:
        """Refuse a cache of an attachment that is off its model: nothing could go on with it."""
        if not self.attached:
            raise CacheUseError(
                f"HillInfer was taken off the {self.name}, by detach() or at the end of a with "
                "block: hillinfer.attach(model) again, and make caches of that attachment"
            )

    def of_another(self, model: PreTrainedModel, cache: object, open_caches: int) -> CacheUseError:
        """Return what to say where another model is to go on with a cache; see `untold`."""
        return CacheUseError(
            f"{cache!r} (open caches of its engine: {open_caches}) was made for another model than "
            f"the {named_model(model)} that was called: call the model it was made for, or make a "
            "cache with new_cache() of the attachment of this one"
        )

    def untold(self, cache: object, open_caches: int) -> CacheUseError:
        """Return what to say to whoever stores in a cache that was not told about it.

        Parameters
        ----------
        cache
            That one; its `repr` is its name.
        open_caches
            Of its engine, it among them.
        """
        return CacheUseError(
            f"{cache!r} was not told about the forward pass: {self._reason(open_caches)}"
        )

    def _reason(self, open_caches: int) -> str:
        model, called = self.model(), _modules_on_the_stack()
        parts = set() if model is None else set(map(id, model.modules()))
        if not any(id(one) in parts for one in called):
            if model is not None and any(
                getattr(one, "config", None) is model.config for one in called
            ):
                return (
                    "another model that shares the config of the attached one was called: call the "
                    "model that was attached, or attach a copy.deepcopy of the other"
                )
            return (
                "a model that HillInfer was never put on was called: hillinfer.attach(model) first"
            )
        if not self.attached:
            return (
                "HillInfer was taken off the model, by detach() or at the end of a with block "
                f"(open caches of its engine: {open_caches}): hillinfer.attach(model) again and go "
                "on with this cache, or close() each"
            )
        if not any(one is model for one in called):
            return "call the model that was attached, not a part of it"
        if any(isinstance(one, torch._dynamo.OptimizedModule) for one in called):
            return (
                "the model was compiled, and ran, before it was attached: call torch.compile(model)"
                " again after hillinfer.attach(model)"
            )
        return "call the model that was attached itself, not its forward method"


def of_model(model: ModelInUse | None) -> str:
    """Return what follows the name of a cache: whose it is."""
    return "" if model is None else f", made for {model.name}"


def named_model(model: PreTrainedModel) -> str:
    """Return a model's class, and where it is from if that is known."""
    place = getattr(model, "name_or_path", "")
    return type(model).__name__ + (f" {place!r}" if place else "")


def of_another_type(stored: torch.dtype, dtype: torch.dtype) -> CacheUseError:
    """Return what to say where a model computes in another type than rows are stored for."""
    made_for = "bfloat16" if stored is torch.bfloat16 else "float16 or float32"
    return CacheUseError(
        f"this cache was made while the model computed in {made_for}, and it computes in "
        f"{str(dtype).removeprefix('torch.')} now: make another with new_cache()"
    )


def _modules_on_the_stack() -> list[Any]:
    """Return the modules whose methods are being called."""
    called, frame = [], sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        of = frame.f_locals.get("self")
        if isinstance(of, torch.nn.Module):
            called.append(of)
    return called


# --- models ---

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
