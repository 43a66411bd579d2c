# SPDX-License-Identifier: Apache-2.0
"""Forms that drop no token: text, all rows in memory or in the store, and codes of a few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hillinfer.errors import CacheUseError, SettingsError
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


# --- Codes of a few bits ---

GROUP_NUMBERS = 64
_BITS = (8, 4, 2)
_SCALE_BYTES = 4
_FP16_MOST = 65504.0


@dataclass(frozen=True)
class Codes:
    """Numbers coded by groups along the last dimension: low + code · step.

    Parameters
    ----------
    packed
        uint8 (..., groups, group · bits / 8); the first number has the lowest bits.
    low, step
        float16 (..., groups).
    bits
        Of a code.
    """

    packed: torch.Tensor
    low: torch.Tensor
    step: torch.Tensor
    bits: int

    @classmethod
    def of(cls, numbers: torch.Tensor, bits: int, group: int) -> Codes:
        """Code numbers (..., n), of which each group is coded between its least and its most.

        Rounded ties go to the even code. A group whose numbers are the same has steps of 0.
        """
        # Lows are FP16, which bfloat16 may pass.
        bounded = numbers.to(torch.float32).clamp(-_FP16_MOST, _FP16_MOST)
        grouped = bounded.reshape(*numbers.shape[:-1], -1, group)
        low = grouped.amin(-1).to(torch.float16)
        step = ((grouped.amax(-1) - low.float()) / (2**bits - 1)).to(torch.float16)
        divisor = torch.where(step == 0, torch.ones_like(step), step).float()
        codes = ((grouped - low.float()[..., None]) / divisor[..., None]).round()
        codes = codes.clamp(0, 2**bits - 1).to(torch.uint8)
        parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        packed = (parts << shifts).sum(-1, dtype=torch.uint8)
        return cls(packed, low, step, bits)

    def numbers(self) -> torch.Tensor:
        """Return the numbers that the codes stand for, float32 (..., n)."""
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8)
        codes = (self.packed[..., None] >> shifts) & (2**self.bits - 1)
        grouped = codes.flatten(-2).float() * self.step.float()[..., None]
        numbers: torch.Tensor = (grouped + self.low.float()[..., None]).flatten(-2)
        return numbers

    @property
    def byte_count(self) -> int:
        """Bytes of codes, lows and steps."""
        parts = (self.packed, self.low, self.step)
        return sum(part.numel() * part.element_size() for part in parts)


class QuantisedForm(Form):
    """Codes of all keys and values, as KIVI has them: keys by channel, values by token.

    Each group of 64 numbers has a least number and a step in FP16: of a key's channel 64 tokens
    together, of a token's value 64 channels, or all where a head has fewer or no multiple of them.

    Parameters
    ----------
    bits
        8, 4 or 2.
    """

    def __init__(self, bits: int) -> None:
        if bits not in _BITS:
            raise SettingsError(f"codes of {bits} bits: choose one of 8, 4, 2")
        self._bits = bits

    @property
    def name(self) -> str:
        """Like `int4`."""
        return f"int{self._bits}"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the bytes of codes, and 4 bytes for each group."""
        numbers = shape.layers * shape.kv_heads * shape.head_dim * tokens
        groups = numbers // GROUP_NUMBERS + numbers // value_group(shape.head_dim)
        return 2 * numbers * self._bits // 8 + _SCALE_BYTES * groups

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Code keys and values.

        Raises
        ------
        SettingsError
            Where the tokens are no whole groups of 64.
        """
        if states.tokens % GROUP_NUMBERS:
            raise SettingsError(
                f"{self.name} of {states.tokens} tokens: give whole groups of {GROUP_NUMBERS}, "
                "as the store has them"
            )
        coded = [
            (
                # (kv_heads, head_dim, tokens): groups of tokens of one channel.
                Codes.of(keys.cpu().transpose(1, 2), self._bits, GROUP_NUMBERS),
                Codes.of(values.cpu(), self._bits, value_group(values.shape[-1])),
            )
            for keys, values in states.layers
        ]
        return _MadeCodes(coded, states.tokens, model)

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time that reading codes and widening them takes."""
        reading = self.byte_count(shape, tokens) / rates.tier_bytes
        widening = states_bytes(shape, tokens) / rates.widened_bytes
        return FormSeconds(reading + widening, rates.token_seconds)


class _MadeCodes(MadeForm):
    def __init__(self, layers: list[tuple[Codes, Codes]], tokens: int, model: Any) -> None:
        super().__init__(tokens)
        self._layers, self._model = layers, model

    @property
    def byte_count(self) -> int:
        return sum(keys.byte_count + values.byte_count for keys, values in self._layers)

    def parts(self) -> list[torch.Tensor]:
        codes = [one for layer in self._layers for one in layer]
        return [part for one in codes for part in (one.packed, one.low, one.step)]

    def with_parts(self, parts: Sequence[torch.Tensor]) -> MadeForm:
        bits = self._layers[0][0].bits
        codes = [
            Codes(packed, low, step, bits)
            for packed, low, step in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        ]
        return _MadeCodes(list(zip(codes[::2], codes[1::2], strict=True)), self.tokens, self._model)

    def open(self) -> OpenedForm:
        device, dtype = self._model.device, self._model.dtype
        layers = [
            (
                keys.numbers().transpose(1, 2).to(device, dtype),
                values.numbers().to(device, dtype),
            )
            for keys, values in self._layers
        ]
        return OpenedForm(opened_cache(layers, self.tokens))


def value_group(head_dim: int) -> int:
    """Return how many numbers of a token's value share a step."""
    return head_dim if head_dim % GROUP_NUMBERS else GROUP_NUMBERS


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
