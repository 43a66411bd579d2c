# SPDX-License-Identifier: Apache-2.0
"""Forms that keep all: text, all rows in memory, and all rows in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hillinfer.errors import CacheUseError
from hillinfer.forms.form import (
    DocumentStates,
    Form,
    FormRates,
    FormSeconds,
    LayerStates,
    MadeForm,
    OpenedForm,
    opened_cache,
)
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.stored_prompts import StoredPrompts

_ID_BYTES = 4
_STORED_BYTES = 2


def states_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of 16-bit keys and values of so many tokens, without padding of rows."""
    return 2 * _STORED_BYTES * shape.layers * shape.kv_heads * shape.head_dim * tokens


# --- Text ---


class TextForm(Form):
    """Token numbers only: the document is read again."""

    drops_nothing = True
    reads_states = False

    @property
    def name(self) -> str:
        """`text`."""
        return "text"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return 4 bytes a token."""
        return _ID_BYTES * tokens

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Take the token numbers."""
        return _MadeText(states.ids)

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time that reading the prompt takes."""
        return FormSeconds(tokens / rates.prefill_tokens, rates.token_seconds)


class _MadeText(MadeForm):
    def __init__(self, ids: tuple[int, ...]) -> None:
        super().__init__(len(ids))
        self._ids = ids

    @property
    def byte_count(self) -> int:
        return _ID_BYTES * len(self._ids)

    def open(self) -> OpenedForm:
        return OpenedForm(DynamicCache(), self._ids)


# --- All rows in memory ---


class HeldForm(Form):
    """Keys and values of all tokens in 16 bits."""

    drops_nothing = True

    @property
    def name(self) -> str:
        """`held`."""
        return "held"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return 2 bytes a number."""
        return states_bytes(shape, tokens)

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Copy keys and values in the stored type."""
        layout = RowLayout(ModelShape.from_config(model.config, model.dtype))
        layers = [tuple(layout.round(part)[0].clone() for part in layer) for layer in states.layers]
        return MadeStates([(keys, values) for keys, values in layers], states.tokens, model.dtype)

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time that a copy takes."""
        size = self.byte_count(shape, tokens)
        return FormSeconds(size / rates.tier_bytes, rates.token_seconds)


class MadeStates(MadeForm):
    """Keys and values of some tokens in the stored type.

    Parameters
    ----------
    layers
        Keys and values of each layer, (kv_heads, held tokens, head_dim).
    tokens
        Of the document.
    dtype
        The model's.
    """

    def __init__(self, layers: list[LayerStates], tokens: int, dtype: torch.dtype) -> None:
        super().__init__(tokens)
        self._layers, self._dtype = layers, dtype

    @property
    def byte_count(self) -> int:
        """Bytes of keys and values."""
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[torch.Tensor]:
        """Return keys and values of one layer after the other."""
        return [part for layer in self._layers for part in layer]

    def with_parts(self, parts: Sequence[torch.Tensor]) -> MadeForm:
        """Return the same with such keys and values."""
        layers = list(zip(parts[::2], parts[1::2], strict=True))
        return MadeStates(layers, self.tokens, self._dtype)

    def open(self) -> OpenedForm:
        """Return a cache with copies of them."""
        layers = [
            (keys.to(self._dtype, copy=True), values.to(self._dtype, copy=True))
            for keys, values in self._layers
        ]
        return OpenedForm(opened_cache(layers, self.tokens))


# --- Rows of a store, and what other forms are made of ---


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
