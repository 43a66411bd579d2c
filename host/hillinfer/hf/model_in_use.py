# SPDX-License-Identifier: Apache-2.0
"""Why a cache was not told about a forward pass."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from hillinfer.errors import CacheUseError


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
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self.attached = True

    def untold(self) -> CacheUseError:
        """Return what to say to whoever stores in a cache that was not told about it."""
        return CacheUseError(f"this cache was not told about the forward pass: {self._reason()}")

    def _reason(self) -> str:
        model, called = self._model(), _modules_on_the_stack()
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
                "HillInfer was taken off the model, by detach() or at the end of a with block: "
                "hillinfer.attach(model) again and go on with this cache"
            )
        if not any(one is model for one in called):
            return "call the model that was attached, not a part of it"
        if any(isinstance(one, torch._dynamo.OptimizedModule) for one in called):
            return (
                "the model was compiled, and ran, before it was attached: call torch.compile(model)"
                " again after hillinfer.attach(model)"
            )
        return "call the model that was attached itself, not its forward method"


def _modules_on_the_stack() -> list[Any]:
    """Return the modules whose methods are being called."""
    called, frame = [], sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        of = frame.f_locals.get("self")
        if isinstance(of, torch.nn.Module):
            called.append(of)
    return called
