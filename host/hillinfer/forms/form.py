# SPDX-License-Identifier: Apache-2.0
"""What a form of a stored document is, and the cache that it opens into."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from hillinfer.errors import CacheUseError, SettingsError
from hillinfer.model_shape import ModelShape

# --- What a form is made from ---

LayerStates = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DocumentStates:
    """Keys and values of a document, as its stored rows have them.

    Parameters
    ----------
    ids
        Token numbers.
    layers
        Keys and values of each layer, (kv_heads, tokens, head_dim), in the model's type.
    scores
        What droppers found of them, (kv_heads, tokens) in each layer, by their names: one that
        keeps several shares looks once.
    """

    ids: tuple[int, ...]
    layers: tuple[LayerStates, ...]
    scores: dict[str, list[torch.Tensor]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of the document."""
        return len(self.ids)


# --- How long forms take ---


@dataclass(frozen=True)
class FormRates:
    """What a machine does in a second, as measured.

    Parameters
    ----------
    tier_bytes
        Bytes read from the tier that a form lies on.
    widened_bytes
        Bytes of 16-bit rows that codes are widened to.
    prefill_tokens
        Tokens of a prompt that are read.
    token_seconds
        Seconds of a decode step over all tokens in memory.
    """

    tier_bytes: float
    widened_bytes: float
    prefill_tokens: float
    token_seconds: float

    def __post_init__(self) -> None:
        for name in ("tier_bytes", "widened_bytes", "prefill_tokens"):
            rate = getattr(self, name)
            if not 0 < rate < math.inf:
                raise SettingsError(f"{name}={rate} is no rate above 0")


@dataclass(frozen=True)
class FormSeconds:
    """How long a form takes: until what is asked can be read, and each token of an answer."""

    opening: float
    token: float


# --- Forms ---


class MadeForm(ABC):
    """A document in one form.

    Parameters
    ----------
    tokens
        Of the document, whether they are all there or not.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    @property
    @abstractmethod
    def byte_count(self) -> int:
        """Bytes that it takes."""

    @abstractmethod
    def open(self) -> OpenedForm:
        """Return a cache of its own that answers from it."""

    def open_for(self, tokens: int, sequences: int) -> OpenedForm:
        """Return a cache as `open` does, which is said to get so long, in so many forks.

        Only an engine wants to know: it refuses what its budget does not hold.

        Raises
        ------
        BudgetError
            Then.
        """
        return self.open()

    def parts(self) -> list[torch.Tensor]:
        """Return the memory that it is; nothing where it has none of its own."""
        return []

    def with_parts(self, parts: Sequence[torch.Tensor]) -> MadeForm:
        """Return the same form of the same document with such memory, in the order of `parts`."""
        return self

    def close(self) -> None:
        """Give back what it takes; what was opened from it stays."""
        # Most forms are memory, which goes with them.
        return


class Form(ABC):
    """A way to keep documents.

    Attributes
    ----------
    drops_nothing
        Whether answers are those of all rows, so that nothing need be measured.
    selects
        Whether a token that is read by itself attends to what it selects, and a chunk to all.
    lies_in_engine
        Whether an engine holds it, which counts by itself what that takes, and what it opens into.
    lies_on_drive
        Whether it lies on a drive, and takes no memory until it is opened.
    reads_states
        Whether it is made of keys and values; else of token numbers alone.
    is_alike
        Whether it loses about as much of one document of a model as of another.
    """

    drops_nothing: bool = False
    selects: bool = False
    lies_in_engine: bool = False
    lies_on_drive: bool = False
    reads_states: bool = True
    is_alike: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called where it is chosen, like `int4`."""

    @abstractmethod
    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the bytes that so many tokens take; exactly what a made form says."""

    @abstractmethod
    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Make the form; the states are left as they are.

        Parameters
        ----------
        model
            A causal language model of transformers, that the states are of.
        states
            From the store; see `stored_states`.
        """

    @abstractmethod
    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return how long it takes, computed from rates."""


# --- What a form opens into ---


@dataclass(frozen=True)
class OpenedForm:
    """A cache that goes on from a document.

    Parameters
    ----------
    cache
        To pass as `past_key_values`; its length is that of the tokens it stands for.
    unread
        Token numbers of the document that are still to be read into it.
    """

    cache: Any
    unread: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the cache where it is one that can be closed."""
        getattr(self.cache, "close", lambda: None)()


class GapLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that holds some of a document's tokens and stands for all.

    It says the length of the whole document, so that tokens behind it get the positions they would
    have. Keys keep the rotary positions they had. Every token of it lies before every new one, so
    for the causal mask it does not matter which ones are missing.

    Parameters
    ----------
    keys, values
        (1, kv_heads, held tokens, head_dim), in the model's type.
    missing
        How many tokens are not there.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, missing: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._missing = missing
        self._held = keys.shape[-2]

    def get_seq_length(self) -> int:
        """Return how many tokens it stands for."""
        held: int = super().get_seq_length()
        return held + self._missing

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a pass attends to, and the position that the mask gives the first.

        Keys count as the last ones before the new tokens.
        """
        held: int = super().get_seq_length()
        return held + query_length, self._missing

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens behind the document.

        Raises
        ------
        CacheUseError
            Where it would cut into the document: which of its tokens are there is not known.
        """
        behind = super().get_seq_length() - self._held
        if self._missing and abs(tokens_to_remove) > behind:
            raise CacheUseError(
                f"crop({tokens_to_remove}) cuts into a document of which {self._missing} tokens "
                f"were dropped; {behind} tokens came after it: open another form"
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        self._missing = self._held = 0
        super().reset()


def opened_cache(layers: Sequence[LayerStates], tokens: int) -> DynamicCache:
    """Return a cache that holds states and stands for so many tokens.

    Parameters
    ----------
    layers
        Keys and values of each layer, (kv_heads, held tokens, head_dim), in the model's type.
    tokens
        Of the document.
    """
    cache = DynamicCache()
    cache.layers = [
        GapLayer(keys[None], values[None], tokens - keys.shape[1]) for keys, values in layers
    ]
    return cache
