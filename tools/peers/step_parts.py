# SPDX-License-Identifier: Apache-2.0
"""Times the parts of a decode step of a transformers model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_ATTENTION = "self_attn"


class StepParts:
    """Hooks that time a model's linear layers, attention and predictions; a context manager.

    Prediction is whatever hooks of others do before a decoder layer begins: HillInfer's predict the
    next layer's query there and announce it. Hooks that are put on later are not seen.

    Parameters
    ----------
    model
        Of transformers, on the CPU.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._began: dict[Any, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._linear = self._attention = self._linear_in_attention = self._prediction = 0.0
        self._inside = self._predicting = False

    def milliseconds(self, step: Callable[[], object], steps: int) -> dict[str, float]:
        """Return the median of `steps` steps, in milliseconds, and of its parts.

        `attention` is all of it but its linear layers: rotation, cache, selection, reading and the
        softmax; `prediction` has its own norms and linear layers in it; `rest` is norms,
        activations and Python. Hooks lengthen what they time by microseconds a module.
        """
        taken = []
        for _ in range(steps):
            self._clear()
            began = time.perf_counter()
            step()
            whole = time.perf_counter() - began
            attention = self._attention - self._linear_in_attention
            known = (self._linear, attention, self._prediction)
            taken.append((whole, *known, whole - sum(known)))
        medians = [1e3 * statistics.median(column) for column in zip(*taken, strict=True)]
        names = ("step", "linear", "attention", "prediction", "rest")
        return dict(zip(names, medians, strict=True))

    def __enter__(self) -> StepParts:
        for layer in self._model.get_decoder().layers:
            # Around the hooks that are there, which stay as they are.
            self._hooks += [
                layer.register_forward_pre_hook(self._before_prediction, prepend=True),
                layer.register_forward_pre_hook(self._after_prediction),
            ]
        for name, module in self._model.named_modules():
            is_linear = isinstance(module, torch.nn.Linear)
            if is_linear or name.rpartition(".")[2] == _ATTENTION:
                before, after = (
                    (self._before, self._after_linear)
                    if is_linear
                    else (self._before_attention, self._after_attention)
                )
                self._hooks.append(module.register_forward_pre_hook(before))
                self._hooks.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _before(self, module: Any, _: object) -> None:
        self._began[module] = time.perf_counter()

    def _after_linear(self, module: Any, _: object, __: object) -> None:
        seconds = time.perf_counter() - self._began.pop(module)
        if self._predicting:
            return
        self._linear += seconds
        if self._inside:
            self._linear_in_attention += seconds

    def _before_attention(self, module: Any, _: object) -> None:
        self._inside = True
        self._before(module, _)

    def _after_attention(self, module: Any, _: object, __: object) -> None:
        self._attention += time.perf_counter() - self._began.pop(module)
        self._inside = False

    def _before_prediction(self, module: Any, _: object) -> None:
        self._predicting = True
        self._before(module, _)

    def _after_prediction(self, module: Any, _: object) -> None:
        self._prediction += time.perf_counter() - self._began.pop(module)
        self._predicting = False
