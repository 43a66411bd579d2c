# SPDX-License-Identifier: Apache-2.0
"""How codes of few bits lie in units, and attention that reads them."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.errors import SettingsError
from hillinfer.model_shape import ModelShape
from hillinfer_bench.frontier.four_bit import GROUP, RESIDUAL
from hillinfer_bench.rivals.few_bits.native import native_codes

# Codes of more bits than a nibble have the rest in planes.
_NIBBLE = 4


@dataclass(frozen=True)
class UnitForm:
    """Where the codes of a unit of tokens lie: blocks of lines of one group each.

    Keys first, head by head, a block for every 32 tokens with a line for each channel. Then values,
    head by head, a block for every 32 channels with a line for each token. A block has the lines'
    nibbles, item i and item i + 16 in a byte, then the bits beyond four, then every line's least
    value and every line's step as FP16.

    Parameters
    ----------
    shape
        The model's.
    bits
        Of a code, 4 or 5.
    tokens
        Of a unit, a multiple of 128.

    Raises
    ------
    SettingsError
        Where a group of channels does not fill bytes.
    """

    shape: ModelShape
    bits: int
    tokens: int = RESIDUAL

    def __post_init__(self) -> None:
        """Refuse what does not lie in bytes."""
        if self.shape.head_dim % 8 or self.shape.head_dim % self.channels:
            raise SettingsError(
                f"{self.shape.head_dim} channels a head: a cache of few bits needs a multiple of 8"
            )

    @classmethod
    def of_whole_pages(cls, shape: ModelShape, bits: int) -> UnitForm:
        """Return the smallest unit that fills pages of the drive."""
        token = cls(shape, bits).token_bytes
        pages = PAGE_BYTES // gcd(RESIDUAL, PAGE_BYTES)
        return cls(shape, bits, RESIDUAL * (pages // gcd(token, pages)))

    @property
    def channels(self) -> int:
        """Channels of a group of values."""
        return GROUP if self.shape.head_dim % GROUP == 0 else self.shape.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one layer."""
        return self.byte_count // self.tokens

    @property
    def byte_count(self) -> int:
        """Bytes of a unit."""
        keys = self._block_bytes(self.shape.head_dim, GROUP) * (self.tokens // GROUP)
        groups = self.shape.head_dim // self.channels
        return self.shape.kv_heads * (keys + self._block_bytes(self.tokens, self.channels) * groups)

    def key_blocks(self, unit: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View a unit's keys as (kv_heads, groups of tokens, bytes of a block)."""
        size = self._block_bytes(self.shape.head_dim, GROUP)
        count = self.shape.kv_heads * (self.tokens // GROUP)
        return unit[: count * size].reshape(self.shape.kv_heads, -1, size)

    def value_blocks(self, unit: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View a unit's values as (kv_heads, groups of channels, bytes of a block)."""
        size = self._block_bytes(self.tokens, self.channels)
        count = self.shape.kv_heads * (self.shape.head_dim // self.channels)
        return unit[self.byte_count - count * size :].reshape(self.shape.kv_heads, -1, size)

    def _block_bytes(self, lines: int, items: int) -> int:
        return lines * (items // 2 + self._high_bytes(items) + 4)

    def _high_bytes(self, items: int) -> int:
        return items // 8 if self.bits > _NIBBLE else 0

    def put(
        self, blocks: NDArray[np.uint8], lines: int, first: int, items: NDArray[np.float32]
    ) -> None:
        """Code lines of blocks.

        Parameters
        ----------
        blocks
            (..., bytes of a block), written to.
        lines
            Of a block.
        first
            The first line that is coded.
        items
            (..., coded lines, items of a line).
        """
        count, size = items.shape[-2:]
        half = size // 2
        most_code = np.float32(2**self.bits - 1)
        least = items.min(-1).astype(np.float16)
        low = least.astype(np.float32)
        step = ((items.max(-1) - low) / most_code).astype(np.float16)
        wide = np.maximum(step.astype(np.float32), np.float32(1e-7))
        codes = np.rint((items - low[..., None]) / wide[..., None]).clip(0, most_code)
        codes = codes.astype(np.uint8)
        nibbles = (codes[..., :half] & 15) | (codes[..., half:] & 15) << 4
        own = slice(first, first + count)
        nibble_part, high_part, least_part, step_part = self._parts(blocks, lines, size)
        nibble_part[..., own, :] = nibbles
        if self.bits > _NIBBLE:
            high_part[..., own, :] = np.packbits(codes >> 4, axis=-1, bitorder="little")
        least_part[..., own, :] = least[..., None].view(np.uint8)
        step_part[..., own, :] = step[..., None].view(np.uint8)

    def take(self, blocks: NDArray[np.uint8], lines: int, size: int) -> NDArray[np.float32]:
        """Return what the codes of blocks stand for, (..., lines, items of a line).

        Parameters
        ----------
        blocks
            (..., bytes of a block).
        lines, size
            Lines of a block, and items of a line.
        """
        nibble_part, high_part, least_part, step_part = self._parts(blocks, lines, size)
        codes = np.concatenate([nibble_part & 15, nibble_part >> 4], -1)
        if self.bits > _NIBBLE:
            codes = codes | np.unpackbits(high_part, axis=-1, bitorder="little") << 4
        least, step = (
            np.ascontiguousarray(part).view(np.float16).astype(np.float32)
            for part in (least_part, step_part)
        )
        return codes * step + least

    def _parts(
        self, blocks: NDArray[np.uint8], lines: int, size: int
    ) -> tuple[NDArray[np.uint8], ...]:
        """View blocks as nibbles, high bits, least values and steps, each (..., lines, bytes)."""
        widths = (size // 2, self._high_bytes(size), 2, 2)
        parts, at = [], 0
        for width in widths:
            part = blocks[..., at : at + lines * width]
            parts.append(part.reshape(*blocks.shape[:-1], lines, width))
            at += lines * width
        return tuple(parts)


class Newest:
    """The newest tokens of a layer and sequence as float32: token t in row t % 128.

    Parameters
    ----------
    keys, values
        (kv_heads, 128, head_dim).
    """

    def __init__(self, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        self.keys = keys
        self.values = values
        self.length = 0

    @property
    def coded_keys(self) -> int:
        """Tokens whose keys are codes: 128 rows become codes when the next token comes."""
        return max(0, self.length - 1) // RESIDUAL * RESIDUAL

    @property
    def coded_values(self) -> int:
        """Tokens whose values are codes: all but the last 128."""
        return max(0, self.length - RESIDUAL)


class CodedAttention(ABC):
    """Codes rows, and attends to codes and rows with one softmax, units after units.

    Parameters
    ----------
    form
        Of units.
    """

    name: str

    def __init__(self, form: UnitForm) -> None:
        self.form = form

    @abstractmethod
    def code_keys(self, unit: NDArray[np.uint8], first: int, newest: Newest) -> None:
        """Code all 128 rows of keys into a unit, from one of its tokens on."""

    @abstractmethod
    def code_values(
        self, unit: NDArray[np.uint8], first: int, newest: Newest, row: int, count: int
    ) -> None:
        """Code some rows of values into a unit, from one of its tokens on."""

    @abstractmethod
    def begin(self, query: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the empty sums of scaled queries (query_heads, head_dim).

        Of each query head the largest score, the sum of weights, and the weighted values.
        """

    @abstractmethod
    def add(
        self,
        sums: NDArray[np.float32],
        query: NDArray[np.float32],
        units: NDArray[np.uint8],
        first: int,
        newest: Newest,
        *,
        is_last: bool,
    ) -> None:
        """Attend to units, and in the last call to the newest tokens.

        Parameters
        ----------
        sums, query
            As in `begin`; sums are changed.
        units
            Contiguous uint8 (units, bytes of a unit).
        first
            The first unit's first token.
        newest
            Says up to which token keys and values are coded.
        is_last
            Whether all units were given.
        """


class NumpyAttention(CodedAttention):
    """Widens the codes of some units at a time, as a cache of transformers does; see the base."""

    name = "widened by numpy"

    def code_keys(self, unit: NDArray[np.uint8], first: int, newest: Newest) -> None:
        """Code all rows of keys; see `CodedAttention`."""
        kv_heads, _, head_dim = newest.keys.shape
        grouped = newest.keys.reshape(kv_heads, -1, GROUP, head_dim).swapaxes(2, 3)
        own = slice(first // GROUP, (first + RESIDUAL) // GROUP)
        self.form.put(self.form.key_blocks(unit)[:, own], head_dim, 0, grouped)

    def code_values(
        self, unit: NDArray[np.uint8], first: int, newest: Newest, row: int, count: int
    ) -> None:
        """Code some rows of values; see `CodedAttention`."""
        rows = newest.values[:, row : row + count]
        grouped = rows.reshape(*rows.shape[:2], -1, self.form.channels).swapaxes(1, 2)
        self.form.put(self.form.value_blocks(unit), self.form.tokens, first, grouped)

    def begin(self, query: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return nothing but a largest score of none; see `CodedAttention`."""
        sums = np.zeros((len(query), 2 + query.shape[1]), np.float32)
        sums[:, 0] = -np.inf
        return sums

    def add(
        self,
        sums: NDArray[np.float32],
        query: NDArray[np.float32],
        units: NDArray[np.uint8],
        first: int,
        newest: Newest,
        *,
        is_last: bool,
    ) -> None:
        """Widen unit after unit; see `CodedAttention`."""
        for number, unit in enumerate(units):
            start = first + number * self.form.tokens
            keys = self._keys(unit)[:, : max(0, newest.coded_keys - start)]
            if keys.shape[1]:
                values = self._values(unit)[:, : keys.shape[1]]
                whole = max(0, newest.coded_values - start)
                places = np.arange(start + whole, start + keys.shape[1]) % RESIDUAL
                values[:, whole:] = newest.values[:, places]
                _add(sums, query, keys, values)
        if is_last:
            places = np.arange(newest.coded_keys, newest.length) % RESIDUAL
            _add(sums, query, newest.keys[:, places], newest.values[:, places])

    def _keys(self, unit: NDArray[np.uint8]) -> NDArray[np.float32]:
        head_dim = self.form.shape.head_dim
        blocks = self.form.take(self.form.key_blocks(unit), head_dim, GROUP)
        return blocks.swapaxes(2, 3).reshape(len(blocks), -1, head_dim)

    def _values(self, unit: NDArray[np.uint8]) -> NDArray[np.float32]:
        form = self.form
        blocks = form.take(form.value_blocks(unit), form.tokens, form.channels)
        return blocks.swapaxes(1, 2).reshape(len(blocks), form.tokens, -1)


def _add(
    sums: NDArray[np.float32],
    query: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
) -> None:
    grouped = torch.from_numpy(query).view(len(keys), -1, query.shape[1])
    scores = torch.matmul(grouped, torch.from_numpy(keys).transpose(1, 2)).flatten(0, 1).numpy()
    largest = np.maximum(sums[:, 0], scores.max(1))
    weights = np.exp(scores - largest[:, None])
    sums[:, 1:] *= np.exp(sums[:, 0] - largest)[:, None]
    sums[:, 0] = largest
    sums[:, 1] += weights.sum(1)
    own = torch.from_numpy(weights).view(len(keys), -1, weights.shape[1])
    weighted = torch.matmul(own, torch.from_numpy(np.ascontiguousarray(values)))
    sums[:, 2:] += weighted.flatten(0, 1).numpy()


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in ("kv_heads", "group", "head_dim", "bits", "unit_tokens", "threads")
    )


class _Newest(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    )


class NativeAttention(CodedAttention):
    """Reads codes where they lie, compiled for this machine; see the base.

    Parameters
    ----------
    form
        Of units.
    library
        Of `few_bits.cpp`.
    """

    name = "native over codes"

    def __init__(self, form: UnitForm, library: ctypes.CDLL) -> None:
        super().__init__(form)
        self._library = library

    @property
    def reads_form(self) -> bool:
        """Whether the library reads this form: groups of 32 channels, and 8 heads on a key."""
        own = self._shape()
        found = int(self._library.few_bits_unit_bytes(ctypes.byref(own)))
        return found == self.form.byte_count

    def code_keys(self, unit: NDArray[np.uint8], first: int, newest: Newest) -> None:
        """Code all rows of keys; see `CodedAttention`."""
        given = unit.ctypes.data, first, RESIDUAL, newest.keys.ctypes.data
        self._library.few_bits_code_keys(ctypes.byref(self._shape()), *given)

    def code_values(
        self, unit: NDArray[np.uint8], first: int, newest: Newest, row: int, count: int
    ) -> None:
        """Code some rows of values; see `CodedAttention`."""
        start = newest.values.ctypes.data + row * newest.values.strides[1]
        own = ctypes.byref(self._shape())
        self._library.few_bits_code_values(own, unit.ctypes.data, first, count, start)

    def begin(self, query: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return empty sums; see `CodedAttention`."""
        sums = np.empty((len(query), 2 + query.shape[1]), np.float32)
        self._library.few_bits_begin(ctypes.byref(self._shape()), sums.ctypes.data)
        return sums

    def add(
        self,
        sums: NDArray[np.float32],
        query: NDArray[np.float32],
        units: NDArray[np.uint8],
        first: int,
        newest: Newest,
        *,
        is_last: bool,
    ) -> None:
        """Attend with all compute threads; see `CodedAttention`."""
        own = _Newest(newest.keys.ctypes.data, newest.values.ctypes.data, newest.length)
        # Rows stand for values that are not coded yet beside keys that are.
        needed = is_last or first + len(units) * self.form.tokens > newest.coded_values
        self._library.few_bits_attend(
            ctypes.byref(self._shape()),
            query.ctypes.data,
            units.ctypes.data,
            len(units),
            first,
            newest.coded_keys,
            newest.coded_values,
            ctypes.byref(own) if needed else None,
            is_last,
            sums.ctypes.data,
        )

    def _shape(self) -> _Shape:
        shape, threads = self.form.shape, torch.get_num_threads()
        numbers = shape.kv_heads, shape.group_size, shape.head_dim
        return _Shape(*numbers, self.form.bits, self.form.tokens, threads)


FORMS = (NativeAttention.name, NumpyAttention.name)


def coded_attention(form: UnitForm, name: str | None = None) -> CodedAttention:
    """Return what attends to units: natively where a compiler is there and the form is known.

    Parameters
    ----------
    form
        Of units.
    name
        One of `FORMS`; None for the fastest that is there.

    Raises
    ------
    SettingsError
        Where there is none of that name.
    """
    if name not in (None, *FORMS):
        raise SettingsError(f"form={name!r}: choose one of {', '.join(FORMS)}")
    library = None if name == NumpyAttention.name else native_codes()
    if library is not None:
        native = NativeAttention(form, library)
        if native.reads_form:
            return native
    if name == NativeAttention.name:
        raise SettingsError(f"form={name!r} cannot be made here: no compiler, or another shape")
    return NumpyAttention(form)
