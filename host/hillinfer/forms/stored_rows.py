# SPDX-License-Identifier: Apache-2.0
"""Stored rows: the form that takes no memory, and what other forms are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import DynamicCache

from hillinfer.errors import CacheUseError
from hillinfer.forms.form import (
    DocumentStates,
    Form,
    FormRates,
    FormSeconds,
    MadeForm,
    OpenedForm,
)
from hillinfer.forms.whole import states_bytes
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.stored_prompts import StoredPrompts


class StoredRowsForm(Form):
    """Reads all rows from the store into an ordinary cache, layer by layer while it is used.

    Parameters
    ----------
    prompts
        The store, as the model uses it; open as long as what is made or opened is.
    """

    drops_nothing = True
    reads_states = False

    def __init__(self, prompts: StoredPrompts) -> None:
        self._prompts = prompts

    @property
    def name(self) -> str:
        """`rows`."""
        return "rows"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return 0: the rows are stored anyway."""
        return 0

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Note the token numbers; the states are not looked at."""
        return _MadeStoredRows(self._prompts, states.ids)

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time that reading all rows takes."""
        return FormSeconds(states_bytes(shape, tokens) / rates.tier_bytes, rates.token_seconds)


class _MadeStoredRows(MadeForm):
    def __init__(self, prompts: StoredPrompts, ids: tuple[int, ...]) -> None:
        super().__init__(len(ids))
        self._prompts, self._ids = prompts, ids

    @property
    def byte_count(self) -> int:
        return 0

    def open(self) -> OpenedForm:
        """Return a cache whose rows stream in; what the store lost of them is still to be read.

        Raises
        ------
        CacheUseError
            Where the store has none of them any more.
        """
        cache = DynamicCache()
        # As in `stored_states`: two tokens that nobody asks for.
        found = self._prompts.load_into(cache, [*self._ids, 0, 0])
        if not found:
            raise CacheUseError(
                f"the store has no rows of this document of {len(self._ids)} tokens any more: "
                "open it as text, or put it there again"
            )
        return OpenedForm(cache, self._ids[found:])


# --- what forms are made of ---


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
