# SPDX-License-Identifier: Apache-2.0
"""The form of HillInfer's own: key shadows in memory, and rows that are read where the store is.

Nothing is dropped. The document's shadows and checksums are read once; each answer then reads the
rows that it selects where the store has them.
"""

from __future__ import annotations

from typing import Any

import torch

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.errors import CacheUseError
from hillinfer.forms.form import (
    DocumentStates,
    Form,
    FormRates,
    FormSeconds,
    MadeForm,
    OpenedForm,
)
from hillinfer.hf.attach import Attachment
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.stored_cache import StoredCache
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.shadow.store import shadow_bytes


class ShadowedForm(Form):
    """Keeps a document open in the engine; each opening is a fork, which reads and copies nothing.

    Parameters
    ----------
    attachment
        Of the model that answers; its settings say how shadows are coded and what is selected. Its
        budget holds the shadows of all documents that are kept so.
    prompts
        The store, as that model uses it; open as long as what is made is.
    """

    selects = True
    lies_in_engine = True
    reads_states = False

    def __init__(self, attachment: Attachment, prompts: StoredPrompts) -> None:
        self._attachment, self._prompts = attachment, prompts

    @property
    def name(self) -> str:
        """Like `shadow-int4`."""
        return f"shadow-{self._attachment.settings.key_mode}"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the bytes of the shadows of all segments, the open one too, in every layer.

        What the engine keeps beside, like probe tokens, is some hundredths more and not in it.
        """
        spec = kernel_spec(shape, self._attachment.settings)
        return shape.layers * -(-tokens // spec.segment_tokens) * shadow_bytes(spec)

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Open the stored document; of the states only the token numbers are looked at.

        Raises
        ------
        CacheUseError
            Where the store has less of it than the states.
        BudgetError
            Where the attachment's budget has no room for its shadows.
        """
        cache = self._attachment.new_cache(expected_tokens=max(1, states.tokens))
        # As in `stored_states`: two tokens that nobody asks for.
        ids = [*states.ids, 0, 0]
        found = 0
        if isinstance(cache, StoredCache):
            # So what comes behind it is read in the soonest way, and stored, as behind any prefix.
            found = cache.look_up(torch.tensor([ids]))
        found = found or self._prompts.fill(cache, ids).found_tokens
        if found < states.tokens:
            cache.close()
            raise CacheUseError(
                f"the store has {found} of the document's {states.tokens} tokens: put it there "
                "again"
            )
        shape = ModelShape.from_config(model.config, model.dtype)
        return MadeShadows(cache, states.tokens, self.byte_count(shape, states.tokens))

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time to read the selected rows, at the rate that single rows are read with."""
        rate = self._attachment.settings.importance_rate
        selected = rate * shape.token_bytes * tokens
        reading = selected / rates.tier_bytes
        return FormSeconds(reading, rates.token_seconds + reading)


class MadeShadows(MadeForm):
    """A document that is open in an engine.

    Parameters
    ----------
    cache
        Of all its tokens, which this closes.
    tokens, byte_count
        Of the document, and what it takes.
    """

    def __init__(self, cache: HillInferCache, tokens: int, byte_count: int) -> None:
        super().__init__(tokens)
        self._cache, self._byte_count = cache, byte_count

    @property
    def byte_count(self) -> int:
        """Bytes of what it keeps in memory."""
        return self._byte_count

    @property
    def cache(self) -> HillInferCache:
        """What is open there."""
        return self._cache

    def open(self) -> OpenedForm:
        """Return a fork, which reads and copies nothing."""
        return OpenedForm(self._cache.fork())

    def open_for(self, tokens: int, sequences: int) -> OpenedForm:
        """Return a fork that the engine makes room for, and counts, as for a cache of its own."""
        return OpenedForm(self._cache.fork_for(tokens, sequences))

    def close(self) -> None:
        """Close the cache; forks of it stay."""
        self._cache.close()
