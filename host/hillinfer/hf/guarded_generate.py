# SPDX-License-Identifier: Apache-2.0
"""An attached model's `generate`."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from hillinfer.errors import ColdPoolError
from hillinfer.hf.attached_cache import AttachedCache
from hillinfer.hf.forward_hooks import check_ids
from hillinfer.hf.turns import Use


class GuardedGenerate:
    """Wraps `generate`, which slices ids before any forward pass could compare them.

    It lies in the model's own attributes. A copy of the model is not attached, and gets what it
    would have without: its own `generate`, with its own weights.

    Parameters
    ----------
    model
        What is attached.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._replaced = model.__dict__.get("generate")
        self._generate: Callable[..., Any] = model.generate
        functools.update_wrapper(self, self._generate)
        model.generate = self

    def remove(self) -> None:
        """Give the model back what it had."""
        del self._model.generate
        if self._replaced is not None:
            self._model.generate = self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; a cache is refused first where the ids do not continue it."""
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, AttachedCache):
            return self._generate(*args, **kwargs)
        with Use(sys._getframe()) as use:
            around = cache.begin_generate(use)
            try:
                ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
                if ids is not None:
                    check_ids(ids)
                    cache.check_continues(ids, kwargs.get("attention_mask"))
                return self._generate(*args, **kwargs)
            except ColdPoolError as error:
                raise ColdPoolError(
                    f"{error}; the tokens generated until then are in the cache's token_ids"
                ) from error
            finally:
                cache.end_generate(around)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._replaced is not None:
            return copy.deepcopy(self._replaced, memo)
        # The copy is there already, and has no attributes yet: this is its class's.
        copied = memo.get(id(self._model))
        return self if copied is None else copied.generate

    def __reduce__(self) -> Any:
        if self._replaced is not None:
            return _itself, (self._replaced,)
        return getattr, (self._model, "generate")


def _itself(generate: Callable[..., Any]) -> Callable[..., Any]:
    return generate
