# SPDX-License-Identifier: Apache-2.0
"""A cache of few bits for all tokens, after KIVI: the plain alternative to selecting."""

from __future__ import annotations

import torch

from hillinfer_bench.quality.policies import Attending, LayerQueries, causal_mask

GROUP = 32
RESIDUAL = 128
# A least value and a step in 16 bits for each group.
_GROUP_BITS = 32 / GROUP


def code_bits(bits: int) -> float:
    """Return the bits of a coded item, its part of the group's two numbers included."""
    return bits + _GROUP_BITS


class CodedCache(Attending):
    """Keys coded per channel in groups of 32 tokens, values per token in groups of 32 channels.

    The newest tokens are in 16 bits: of the values the last 128, of the keys those that do not
    fill 128 yet. So a code is the same whenever it is made (KIVI, section 3).

    Parameters
    ----------
    bits
        Of a code.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def attend(self, layer: LayerQueries, values: torch.Tensor) -> torch.Tensor:
        """Attend to all tokens with one softmax; see `Attending`."""
        keys = layer.keys.float()
        coded = LayerQueries(layer.queries, self._by_tokens(keys), layer.scaling)
        lengths = torch.tensor(list(layer.lengths))[:, None]
        places = torch.arange(len(keys))[None]
        exact_keys = places >= (lengths - 1) // RESIDUAL * RESIDUAL
        exact_values = places >= lengths - RESIDUAL
        products = torch.where(exact_keys, layer.inner_products(), coded.inner_products())
        seen = causal_mask(len(layer.queries), len(keys))
        weights = torch.softmax(products.masked_fill(~seen, -torch.inf), -1)
        out = torch.zeros(1)
        for mask, own in (
            (exact_values, values.float()),
            (~exact_values, self._by_channels(values.float())),
        ):
            out = out + (weights * mask) @ own.transpose(0, 1)[:, None]
        return out.flatten(0, 1)

    def _by_tokens(self, keys: torch.Tensor) -> torch.Tensor:
        """Code whole groups of tokens, channel by channel; the others stay as they are."""
        whole = len(keys) // GROUP * GROUP
        grouped = keys[:whole].view(-1, GROUP, *keys.shape[1:])
        return torch.cat([self._coded(grouped, 1).flatten(0, 1), keys[whole:]])

    def _by_channels(self, values: torch.Tensor) -> torch.Tensor:
        channels = values.shape[-1]
        size = channels if channels % GROUP else GROUP
        return self._coded(values.reshape(*values.shape[:-1], -1, size), -1).flatten(-2)

    def _coded(self, items: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what codes of items stand for, groups along a dimension."""
        least, most = items.amin(dim, keepdim=True), items.amax(dim, keepdim=True)
        least = least.half().float()
        step = ((most - least) / (2**self._bits - 1)).half().float().clamp_min(1e-7)
        codes = torch.round((items - least) / step).clamp(0, 2**self._bits - 1)
        decoded: torch.Tensor = least + codes * step
        return decoded


def row_share(bits: int, length: int) -> float:
    """Return the bytes of a step over those of 16-bit rows, at a length."""
    exact_keys = (length - 1) % RESIDUAL + 1
    exact = (min(exact_keys, length) + min(RESIDUAL, length)) / 2 / length
    return exact + (1 - exact) * code_bits(bits) / 16
