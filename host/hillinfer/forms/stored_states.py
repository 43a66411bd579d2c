# SPDX-License-Identifier: Apache-2.0
"""A stored document's keys and values, read from the store for forms to be made of."""

from __future__ import annotations

from collections.abc import Sequence

from transformers.cache_utils import DynamicCache

from hillinfer.errors import CacheUseError
from hillinfer.forms.form import DocumentStates
from hillinfer.reuse.stored_prompts import StoredPrompts


def stored_states(prompts: StoredPrompts, ids: Sequence[int]) -> DocumentStates:
    """Return the states of what a store has of a document, all its whole groups of 64 tokens.

    The stored rows stay as they are.

    Parameters
    ----------
    prompts
        A store, as the document's model uses it.
    ids
        Token numbers of the document.

    Raises
    ------
    CacheUseError
        Where the store has nothing of it.
    """
    cache = DynamicCache()
    # A prompt's last token is always left to be computed, and not as a pass of a single one: here
    # two follow that nobody asks for.
    found = prompts.load_into(cache, [*ids, 0, 0], new_tokens=0)
    if not found:
        raise CacheUseError(
            f"the store has no rows of this document of {len(ids)} tokens: put it there first"
        )
    # Looking at a layer waits for its rows.
    layers = tuple((layer.keys[0], layer.values[0]) for layer in cache.layers)
    return DocumentStates(tuple(ids[:found]), layers)
