# SPDX-License-Identifier: Apache-2.0
"""What stands around `generate` of an attached model."""

from __future__ import annotations

import functools
import sys
from typing import Any

from hillinfer.errors import ColdPoolError
from hillinfer.hf.attention import AttachedCache, check_ids
from hillinfer.hf.engine import Use
from hillinfer.hf.hooks import Guard, named, regaining
from hillinfer.hf.prompts import PromptCall


class GuardedGenerate(Guard):
    """Wraps `generate`, which slices ids before any forward pass could compare them.

    Parameters as in `Guard`.
    """

    _name = "generate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; a cache is refused first where the ids do not continue it."""
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, AttachedCache):
            return self._guarded(*args, **kwargs)
        with Use(sys._getframe()) as use:
            around = cache.begin_generate(use)
            try:
                given = named(self._guarded, args, kwargs)
                ids, mask = given.get("input_ids", given.get("inputs")), given.get("attention_mask")
                if ids is not None:
                    check_ids(ids)
                    check = functools.partial(cache.check_continues, ids, mask)
                    regaining(cache, self._model, check)
                    call = PromptCall.of_generate(self._model, ids, given)
                    begin = functools.partial(cache.begin_prompt, ids, mask, call)
                    regaining(cache, self._model, begin)
                return self._guarded(*args, **kwargs)
            except ColdPoolError as error:
                raise ColdPoolError(
                    f"{error}; the tokens generated until then are in the cache's token_ids"
                ) from error
            finally:
                cache.end_generate(around)
