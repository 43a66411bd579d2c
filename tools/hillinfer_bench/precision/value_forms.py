# SPDX-License-Identifier: Apache-2.0
"""Ways to code values that the study compares, each as what its codes stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.value_codes import decode_values, encode_values

KEY_FRACTION_BITS = 14


def channel_means(statistics: ChannelStatistics) -> torch.Tensor:
    """Return the channel means of a segment, float32 of shape (kv_heads, head_dim)."""
    return torch.from_numpy(statistics.means).float() * channel_units(statistics)


def channel_units(statistics: ChannelStatistics) -> torch.Tensor:
    """Return 2^(c-14) of each channel, float32 of shape (kv_heads, head_dim)."""
    return torch.exp2(torch.from_numpy(statistics.exponents).float() - KEY_FRACTION_BITS)


class ValueForm(ABC):
    """A way to code values, for comparison.

    Parameters
    ----------
    bits
        Of one code.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    @property
    @abstractmethod
    def name(self) -> str:
        """As the table shows it."""

    @abstractmethod
    def scale_bytes(self, head_dim: int) -> int:
        """Return the bytes of scales of one token and KV head."""

    @abstractmethod
    def decoded(self, values: torch.Tensor, statistics: ChannelStatistics) -> torch.Tensor:
        """Return what the codes of some values stand for.

        Parameters
        ----------
        values
            float32 of shape (tokens, kv_heads, head_dim), of one segment.
        statistics
            The segment's, of its values.

        Returns
        -------
        float32 of the same shape.
        """

    def head_bytes(self, head_dim: int) -> float:
        """Return the bytes of one token and KV head."""
        return self.bits * head_dim / 8 + self.scale_bytes(head_dim)


class MeanScale(ValueForm):
    """Distance from the segment's channel mean over one scale per token and KV head.

    Codes are -m..m with m = 2^(bits-1) - 1; with 2 bits they are the odd numbers -3..3.
    """

    @property
    def name(self) -> str:
        """Scale and bits."""
        return f"{self.scale_name}, {self.bits} bits"

    @property
    @abstractmethod
    def scale_name(self) -> str:
        """What kind of number the scale is."""

    @abstractmethod
    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the scales for the largest distances over what the largest code stands for."""

    def decoded(self, values: torch.Tensor, statistics: ChannelStatistics) -> torch.Tensor:
        """Code around the channel means; see `ValueForm`."""
        means = channel_means(statistics)
        return means + self._coded(values - means)

    def _coded(self, distances: torch.Tensor) -> torch.Tensor:
        largest = distances.abs().amax(-1, keepdim=True)
        if self.bits == 2:
            step = self.scales(largest / 3.5).clamp_min(1e-20)
            return (2 * torch.floor(distances / (2 * step)).clamp(-2, 1) + 1) * step
        most = 2 ** (self.bits - 1) - 1
        step = self.scales(largest / (most + 0.5)).clamp_min(1e-20)
        return torch.round(distances / step).clamp(-most, most) * step


class PowerScale(MeanScale):
    """The scale is a power of two, one byte."""

    scale_name = "power of two"

    def scale_bytes(self, head_dim: int) -> int:
        """One exponent."""
        return 1

    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the next power of two."""
        return torch.exp2(torch.ceil(torch.log2(largest.clamp_min(1e-20))))


class ByteScale(MeanScale):
    """The scale is (8 + f)·2^e in one byte: 3 bits of f, 5 bits of e."""

    scale_name = "byte scale"

    def scale_bytes(self, head_dim: int) -> int:
        """One byte."""
        return 1

    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the next number with three bits behind the leading one."""
        unit = torch.exp2(torch.floor(torch.log2(largest.clamp_min(1e-20))) - 3)
        return torch.ceil(largest / unit) * unit


class HalfScale(MeanScale):
    """The scale is a 16-bit floating-point number."""

    scale_name = "16-bit scale"

    def scale_bytes(self, head_dim: int) -> int:
        """One number."""
        return 2

    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the nearest FP16 number."""
        return largest.half().float()


class ChannelPowers(PowerScale):
    """Each channel also has a power of two of its own per segment, as channels of keys have."""

    scale_name = "channel powers"

    def decoded(self, values: torch.Tensor, statistics: ChannelStatistics) -> torch.Tensor:
        """Code in units of each channel; see `ValueForm`."""
        means, units = channel_means(statistics), channel_units(statistics)
        return means + self._coded((values - means) / units) * units


class ChannelBytes(ByteScale):
    """Channel powers with a byte scale."""

    scale_name = "channel powers, byte scale"

    def decoded(self, values: torch.Tensor, statistics: ChannelStatistics) -> torch.Tensor:
        """Code in units of each channel; see `ValueForm`."""
        means, units = channel_means(statistics), channel_units(statistics)
        return means + self._coded((values - means) / units) * units


class ContractCodes(ValueForm):
    """The contract's value codes, those of INT4 keys (contract, section 14)."""

    def __init__(self) -> None:
        super().__init__(4)

    @property
    def name(self) -> str:
        """As the contract has them."""
        return "as INT4 keys"

    def scale_bytes(self, head_dim: int) -> int:
        """One exponent."""
        return 1

    def decoded(self, values: torch.Tensor, statistics: ChannelStatistics) -> torch.Tensor:
        """Code and decode by the golden model; see `ValueForm`."""
        bits = values.half().contiguous().numpy().view(np.uint16)
        return torch.from_numpy(decode_values(encode_values(bits, statistics), statistics)).float()


GROUP_CHANNELS = 32


class Groups(ValueForm):
    """Groups of 32 channels of a token, each with its least value and a step in 16 bits."""

    @property
    def name(self) -> str:
        """Group and bits."""
        return f"groups of {GROUP_CHANNELS}, {self.bits} bits"

    def scale_bytes(self, head_dim: int) -> int:
        """Two numbers a group."""
        return 4 * (head_dim // GROUP_CHANNELS)

    def decoded(self, values: torch.Tensor, statistics: ChannelStatistics) -> torch.Tensor:
        """Code between least and largest value; see `ValueForm`."""
        return self.coded(values)

    def coded(self, values: torch.Tensor) -> torch.Tensor:
        """Return what codes stand for, of any shape, groups along the last axis."""
        grouped = values.reshape(*values.shape[:-1], -1, GROUP_CHANNELS)
        least, largest = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        most = 2**self.bits - 1
        least = least.half().float()
        step = ((largest - least) / most).half().float().clamp_min(1e-7)
        codes = torch.round((grouped - least) / step).clamp(0, most)
        decoded: torch.Tensor = (least + codes * step).reshape(values.shape)
        return decoded


@dataclass(frozen=True)
class Split:
    """How many of the selected tokens are exact, in 16 bits.

    Parameters
    ----------
    share
        Of all tokens; 0 with a floor of 0 for none at all, not even kept ones.
    floor
        Tokens that are exact at least.
    """

    share: float
    floor: int = 0

    def exact_count(self, length: int, selected: int, kept: int) -> int:
        """Return how many of `selected` tokens are exact, the `kept` among them."""
        if self.share == 0 and self.floor == 0:
            return 0
        wanted = max(kept, self.floor, int(self.share * length + 0.5))
        return min(selected, wanted)
