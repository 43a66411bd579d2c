# SPDX-License-Identifier: Apache-2.0
"""Everything about a model that decides which bits its keys and values have."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.extents.recording import ShadowSlot
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.features import Guard
from hillinfer.hf.hooks import ModelHook, nothing
from hillinfer.model_shape import ModelShape
from hillinfer.sessions.fingerprint import Fingerprint, bytes_digest, weights_digest
from hillinfer.settings import Settings
from hillinfer_model.choices import KeyMode

# What codes a shadow changes no row, and ids say what a tokenizer made of a text.
_NO_MATTER = ("shadow", "tokenizer", "contract_version", "segment_tokens")
# Whose hooks note what layers put out, and change nothing: they stay after the first such pass.
_COLLECTORS = "transformers.utils.output_capturing"


class DescribedModel:
    """A model as it is at each moment: weights, positions, types, adapters, and what covers them.

    Weights are hashed again where torch's counters say that they were written, and where they are
    others; what is written behind the counters, as through `.data`, is not noticed. Weights made
    under `torch.inference_mode` have none, and are hashed each time.

    Parameters
    ----------
    model
        A causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: list[_Seen] | None = None
        self._weights = ""

    def facts(self) -> dict[str, object]:
        """Return what decides the bits, by name, as JSON can say it."""
        model = self._model
        found = asdict(Fingerprint.of(model.config, model.dtype, KeyMode.INT8))
        return {name: value for name, value in found.items() if name not in _NO_MATTER} | {
            "weights": self._digest(),
            "modules": _modules_digest(model),
            "device": model.device.type,
        }

    def _digest(self) -> str:
        here = [*self._model.named_parameters(), *self._model.named_buffers()]
        if not self._has_seen(here):
            seen = [_Seen(name, one) for name, one in here]
            self._weights, self._seen = _weights(self._model), seen
        return self._weights

    def _has_seen(self, here: list[tuple[str, torch.Tensor]]) -> bool:
        seen = self._seen
        if seen is None or len(seen) != len(here):
            return False
        return all(own.is_now(*one) for own, one in zip(seen, here, strict=True))


class _Seen:
    """A tensor of a model, and what torch counted of it at one moment.

    What takes the place of a tensor that is gone often has its number and its address. A weak
    reference tells them apart; that of its memory does so where a tensor got other memory.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._tensor, self._memory = weakref.ref(tensor), weakref.ref(tensor.untyped_storage())
        self._state = self._state_of(name, tensor)

    def is_now(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of this name is the same one, and nobody wrote to it."""
        if self._tensor() is not tensor or self._memory() is not tensor.untyped_storage():
            return False
        return self._state == self._state_of(name, tensor)

    @staticmethod
    def _state_of(name: str, one: torch.Tensor) -> tuple[object, ...]:
        writes = bytes_digest(one) if one.is_inference() else one._version
        return name, one.shape, one.dtype, one.data_ptr(), writes


def _weights(model: Any) -> str:
    """Return the digest of all weights, and of buffers that are saved with none, like rotary's."""
    whole = hashlib.sha256(weights_digest(model).encode())
    for name, one in sorted(model.named_buffers()):
        line = f"{name} {tuple(one.shape)} {one.dtype} "
        data = one.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        whole.update(line.encode() + data.numpy().tobytes())
    return whole.hexdigest()


def _modules_digest(model: torch.nn.Module) -> str:
    """Return the digest of what modules are and say of themselves: adapters, scales, switches."""
    told = [(name, *_told(module)) for name, module in sorted(model.named_modules())]
    return hashlib.sha256(json.dumps(told, separators=(",", ":")).encode()).hexdigest()


def told_of_modules(model: torch.nn.Module, without: str) -> list[list[object]]:
    """Return what modules are and say of themselves by name, but for one of their attributes."""
    return [
        [name, *([_without(one, without) for one in _told(module)])]
        for name, module in sorted(model.named_modules())
    ]


def _without(told: object, name: str) -> object:
    if not isinstance(told, list):
        return told
    return [one for one in told if not (isinstance(one, tuple) and one[0] == name)]


def _told(module: torch.nn.Module) -> Iterator[object]:
    yield _name(type(module))
    own = vars(module)
    if not isinstance(module, PreTrainedModel):
        # Of a whole model they are names of places and what its calls leave behind.
        # What torch keeps books in changes with every hook; hooks are told below.
        books = vars(torch.nn.Module()).keys() - {"training"}
        simple = ((name, _simple(own[name])) for name in sorted(own.keys() - books))
        yield [(name, value) for name, value in simple if value is not None]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        yield [_name(one) for one in hooks.values() if not _is_looking_on(one)]
    covered: Callable[..., Any] | None = own.get("forward")
    while isinstance(covered, Guard):
        # They change no row that is stored: an attached model has those of one that is not, and of
        # what is read in stages nothing is stored before it is read whole.
        covered = covered.replaced
    # A copy of an attached model has its class's.
    if covered is not None and getattr(covered, "__func__", None) is not type(module).forward:
        held = getattr(covered, "__closure__", None) or ()
        yield [_name(covered), *(_name(type(cell.cell_contents)) for cell in held)]


def _is_looking_on(hook: Any) -> bool:
    """Return whether a hook is known to leave a module's outputs as they are."""
    if isinstance(hook, ModelHook) or hook is nothing:
        return True
    return getattr(hook, "__module__", "") == _COLLECTORS


def _name(one: Any) -> str:
    named = one if hasattr(one, "__qualname__") else type(one)
    return f"{named.__module__}.{named.__qualname__}"


def _simple(value: object) -> str | None:
    """Return a value as text, None where it is not made of numbers, names and their lists."""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, dict):
        parts = [(str(key), _simple(one)) for key, one in value.items()]
        return None if any(one is None for _, one in parts) else repr(sorted(parts))
    if isinstance(value, list | tuple | set | frozenset):
        items = [_simple(one) for one in value]
        known = [one for one in items if one is not None]
        ordered = known if isinstance(value, list | tuple) else sorted(known)
        return None if len(known) < len(items) else repr(ordered)
    return None


# --- key shadows ---

# What those of a store are coded in: the one that caches have unless told otherwise.
_SHADOW = KeyMode.INT4


def slot_of(shape: ModelShape) -> ShadowSlot | None:
    """Return how shadows of a model are stored; None where it can have none."""
    try:
        return ShadowSlot(kernel_spec(shape, Settings(shadow=_SHADOW)), shape.layers)
    except ValueError:
        return None


def has_stored_codes(cache: HillInferCache) -> bool:
    """Return whether a cache has the shadows that a store has."""
    return cache.settings.key_mode is _SHADOW
