# SPDX-License-Identifier: Apache-2.0
"""Forms that code keys and values in a few bits, as KIVI does, and drop no token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hillinfer.errors import SettingsError
from hillinfer.forms.form import (
    DocumentStates,
    Form,
    FormRates,
    FormSeconds,
    MadeForm,
    OpenedForm,
    opened_cache,
)
from hillinfer.forms.whole import states_bytes
from hillinfer.model_shape import ModelShape

GROUP_NUMBERS = 64
_BITS = (8, 6, 5, 4, 2)
# Bits of a mixed form's values, and what quarters of the channels of its keys have beside.
_MIXED_BITS = (5, 4, 3)
_QUARTERS = (2, 1, 0, -1)
_SCALE_BYTES, _CHANNEL_BYTES = 4, 2
_FP16_MOST = 65504.0
# Below the first of them FP16 has steps of the second, however small a number is.
_FP16_LEAST_NORMAL, _FP16_LEAST = 2.0**-14, 2.0**-24


@dataclass(frozen=True)
class Codes:
    """Numbers coded by groups along the last dimension: low + code · step.

    Parameters
    ----------
    packed
        uint8 (..., groups, group · bits / 8). Of 6 bits the high 4 of all numbers come first, then
        the low 2; of 5 bits the high 4, then the lowest. The first number has a byte's low bits.
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
        most = 2**bits - 1
        step = ((grouped.amax(-1) - low.float()) / most).to(torch.float16)
        # Of steps that small, rounding leaves so much out that the last code misses the greatest
        # numbers by many steps, or that all numbers become the least.
        misses = low.float() + step.float() * most < grouped.amax(-1)
        step = torch.where(misses & (step < _FP16_LEAST_NORMAL), step + _FP16_LEAST, step)
        divisor = torch.where(step == 0, torch.ones_like(step), step).float()
        codes = ((grouped - low.float()[..., None]) / divisor[..., None]).round()
        codes = codes.clamp(0, most).to(torch.uint8)
        packed, left = [], bits
        for width in _widths(bits):
            left -= width
            parts = (codes >> left) & (2**width - 1)
            parts = parts.reshape(*codes.shape[:-1], -1, 8 // width)
            shifts = torch.arange(0, 8, width, dtype=torch.uint8)
            packed.append((parts << shifts).sum(-1, dtype=torch.uint8))
        return cls(torch.cat(packed, -1), low, step, bits)

    def numbers(self) -> torch.Tensor:
        """Return the numbers that the codes stand for, float32 (..., n)."""
        widths = _widths(self.bits)
        group = self.packed.shape[-1] * 8 // self.bits
        parts = torch.split(self.packed, [group * width // 8 for width in widths], -1)
        codes = _unpacked(parts[0], widths[0])
        for part, width in zip(parts[1:], widths[1:], strict=True):
            codes = (codes << width) | _unpacked(part, width)
        grouped = codes.float() * self.step.float()[..., None]
        numbers: torch.Tensor = (grouped + self.low.float()[..., None]).flatten(-2)
        return numbers

    @property
    def byte_count(self) -> int:
        """Bytes of codes, lows and steps."""
        return sum(part.nbytes for part in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of all three."""
        return [self.packed, self.low, self.step]


def _widths(bits: int) -> tuple[int, ...]:
    """Return how codes are laid out: parts whose widths divide a byte, high bits first."""
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def _unpacked(part: torch.Tensor, width: int) -> torch.Tensor:
    """Return numbers of so many bits, one in each byte."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    numbers: torch.Tensor = ((part[..., None] >> shifts) & (2**width - 1)).flatten(-2)
    return numbers


class QuantisedForm(Form):
    """Codes of all keys and values, as KIVI has them: keys by channel, values by token.

    Each group of 64 numbers has a least number and a step in FP16: of a key's channel 64 tokens
    together, of a token's value 64 channels, or all where a head has fewer or no multiple of them.

    Parameters
    ----------
    key_bits, value_bits
        Of a code: 8, 6, 5, 4 or 2.
    """

    is_alike = True

    def __init__(self, key_bits: int, value_bits: int) -> None:
        for bits in (key_bits, value_bits):
            if bits not in _BITS:
                known = ", ".join(map(str, _BITS))
                raise SettingsError(f"codes of {bits} bits: choose one of {known}")
        self._key_bits, self._value_bits = key_bits, value_bits

    @property
    def name(self) -> str:
        """Like `int4`, or `k5v4` where keys have more bits than values."""
        if self._key_bits == self._value_bits:
            return f"int{self._key_bits}"
        return f"k{self._key_bits}v{self._value_bits}"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the bytes of codes, and 4 bytes for each group."""
        numbers = shape.layers * shape.kv_heads * shape.head_dim * tokens
        groups = numbers // GROUP_NUMBERS + numbers // value_group(shape.head_dim)
        return numbers * (self._key_bits + self._value_bits) // 8 + _SCALE_BYTES * groups

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Code keys and values.

        Raises
        ------
        SettingsError
            Where the tokens are no whole groups of 64, or codes of a head's values no whole bytes.
        """
        _check_groups(self.name, states)
        _check_channels(self.name, states, self._value_bits)
        coded = [
            _CodedLayer(
                # (kv_heads, head_dim, tokens): groups of tokens of one channel.
                (Codes.of(keys.cpu().transpose(1, 2), self._key_bits, GROUP_NUMBERS),),
                None,
                Codes.of(values.cpu(), self._value_bits, value_group(values.shape[-1])),
            )
            for keys, values in states.layers
        ]
        return _MadeCodes(coded, states.tokens, model)

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time that reading codes and widening them takes."""
        return _seconds(self, rates, shape, tokens)


class MixedForm(Form):
    """Codes as `QuantisedForm` has them, with more bits for channels of keys that vary more.

    A step's error in a query's score grows with the range of the channel that it is of. So of each
    head's channels the quarter of the greatest range has two bits more than values have, the next
    one bit more, and the last one bit less: half a bit more in the mean.

    Parameters
    ----------
    bits
        Of values: 5, 4 or 3.
    """

    is_alike = True

    def __init__(self, bits: int) -> None:
        if bits not in _MIXED_BITS:
            known = ", ".join(map(str, _MIXED_BITS))
            raise SettingsError(f"mixed codes of {bits} bits: choose one of {known}")
        self._bits = bits

    @property
    def name(self) -> str:
        """Like `mixed4`."""
        return f"mixed{self._bits}"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the bytes of codes, 4 bytes for each group, and 2 for each channel."""
        channels = shape.layers * shape.kv_heads * shape.head_dim
        groups = channels * tokens // GROUP_NUMBERS
        groups += channels * tokens // value_group(shape.head_dim)
        quarters = channels // len(_QUARTERS)
        key_bits = sum(quarters * tokens * (self._bits + more) for more in _QUARTERS)
        codes = (key_bits + channels * tokens * self._bits) // 8
        return codes + _SCALE_BYTES * groups + _CHANNEL_BYTES * channels

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Code keys and values.

        Raises
        ------
        SettingsError
            Where the tokens are no whole groups of 64, a head's channels no whole quarters, or
            codes of its values no whole bytes.
        """
        _check_groups(self.name, states)
        _check_channels(self.name, states, self._bits)
        coded = []
        for keys, values in states.layers:
            channels = keys.cpu().transpose(1, 2)
            if channels.shape[1] % len(_QUARTERS):
                raise SettingsError(
                    f"{self.name} of heads of {channels.shape[1]} numbers: they have no quarters; "
                    "choose int8"
                )
            order = _by_range(channels)
            parts = _in_order(channels, order).chunk(len(_QUARTERS), 1)
            coded.append(
                _CodedLayer(
                    tuple(
                        Codes.of(part, self._bits + more, GROUP_NUMBERS)
                        for part, more in zip(parts, _QUARTERS, strict=True)
                    ),
                    order.to(torch.int16),
                    Codes.of(values.cpu(), self._bits, value_group(values.shape[-1])),
                )
            )
        return _MadeCodes(coded, states.tokens, model)

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time that reading codes and widening them takes."""
        return _seconds(self, rates, shape, tokens)


@dataclass(frozen=True)
class _CodedLayer:
    """Codes of a layer's keys and values.

    Parameters
    ----------
    keys
        Of some channels each, (kv_heads, channels, tokens).
    order
        Which channels these are, one after the other, int16 (kv_heads, head_dim); None for all of
        them in their own order.
    values
        (kv_heads, tokens, head_dim).
    """

    keys: tuple[Codes, ...]
    order: torch.Tensor | None
    values: Codes

    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of all."""
        codes = [part for one in (*self.keys, self.values) for part in one.tensors()]
        return codes if self.order is None else [*codes, self.order]

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> _CodedLayer:
        """Return the same with the next of such memory."""
        *keys, values = [
            replace(one, packed=next(tensors), low=next(tensors), step=next(tensors))
            for one in (*self.keys, self.values)
        ]
        return _CodedLayer(tuple(keys), None if self.order is None else next(tensors), values)

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, float32 (kv_heads, tokens, head_dim)."""
        channels = torch.cat([one.numbers() for one in self.keys], 1)
        if self.order is not None:
            channels = _in_order(channels, self.order.long().argsort(1))
        return channels.transpose(1, 2), self.values.numbers()


class _MadeCodes(MadeForm):
    def __init__(self, layers: list[_CodedLayer], tokens: int, model: Any) -> None:
        super().__init__(tokens)
        self._layers, self._model = layers, model

    @property
    def byte_count(self) -> int:
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[torch.Tensor]:
        return [part for layer in self._layers for part in layer.tensors()]

    def with_parts(self, parts: Sequence[torch.Tensor]) -> MadeForm:
        tensors = iter(parts)
        layers = [layer.with_tensors(tensors) for layer in self._layers]
        return _MadeCodes(layers, self.tokens, self._model)

    def open(self) -> OpenedForm:
        device, dtype = self._model.device, self._model.dtype
        widened = [layer.states() for layer in self._layers]
        layers = [(keys.to(device, dtype), values.to(device, dtype)) for keys, values in widened]
        return OpenedForm(opened_cache(layers, self.tokens))


def _check_groups(name: str, states: DocumentStates) -> None:
    if states.tokens % GROUP_NUMBERS:
        raise SettingsError(
            f"{name} of {states.tokens} tokens: give whole groups of {GROUP_NUMBERS}, as the "
            "store has them"
        )


def _check_channels(name: str, states: DocumentStates, bits: int) -> None:
    head_dim = states.layers[0][1].shape[-1]
    if any(value_group(head_dim) * width % 8 for width in _widths(bits)):
        raise SettingsError(
            f"{name} of heads of {head_dim} numbers: codes of {bits} bits of a token's value fill "
            "no whole bytes there; choose int8"
        )


def _seconds(form: Form, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
    reading = form.byte_count(shape, tokens) / rates.tier_bytes
    widening = states_bytes(shape, tokens) / rates.widened_bytes
    return FormSeconds(reading + widening, rates.token_seconds)


def _by_range(channels: torch.Tensor) -> torch.Tensor:
    """Return each head's channels by their mean squared range over groups, the greatest first."""
    groups = channels.float().reshape(*channels.shape[:-1], -1, GROUP_NUMBERS)
    ranges: torch.Tensor = (groups.amax(-1) - groups.amin(-1)).square().mean(-1)
    return ranges.argsort(dim=-1, descending=True, stable=True)


def _in_order(channels: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return channels (kv_heads, channels, tokens) in an order (kv_heads, channels)."""
    return channels.gather(1, order[..., None].expand_as(channels))


def value_group(head_dim: int) -> int:
    """Return how many numbers of a token's value share a step."""
    return head_dim if head_dim % GROUP_NUMBERS else GROUP_NUMBERS
