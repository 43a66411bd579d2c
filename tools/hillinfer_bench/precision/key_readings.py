# SPDX-License-Identifier: Apache-2.0
"""Ways to compute inner products of queries and coded tokens' keys, for comparison."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np
import torch

from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_bench.precision.value_forms import ValueForm, channel_means, channel_units
from hillinfer_bench.quality.policies import LayerQueries
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.layout import read_codes
from hillinfer_model.query_codes import encode_scaled_query, scale_query
from hillinfer_model.scores import aligned_products

# L' is log2 of the weight in these units.
_ALIGNED_UNIT = log(2.0) / 256


class KeyReading(ABC):
    """A way to read the keys of coded tokens, for comparison."""

    name: str

    @abstractmethod
    def products(
        self, layer: LayerQueries, segments: Sequence[SegmentShadow], spec: KernelSpec
    ) -> torch.Tensor:
        """Return scaled inner products, float32 (kv_heads, group, queries, N).

        Parameters
        ----------
        layer
            Queries and exact keys.
        segments
            The key shadow of all tokens.
        spec
            What it was made with.
        """


class DecodedShadow(KeyReading):
    """The exact query times what the shadow's codes stand for, in float32."""

    name = "decoded"

    def products(
        self, layer: LayerQueries, segments: Sequence[SegmentShadow], spec: KernelSpec
    ) -> torch.Tensor:
        """Decode the shadow; see `KeyReading`."""
        parts = []
        for segment in segments:
            found = read_codes(segment.shadow, 0, segment.tokens, spec)
            powers = np.exp2(found.exponents.astype(np.float32))[:, :, None]
            distances = torch.from_numpy(found.codes.astype(np.float32) * powers)
            statistics = segment.statistics
            parts.append(distances * channel_units(statistics) + channel_means(statistics))
        return replace(layer, keys=torch.cat(parts)).inner_products()


class AlignedShadow(KeyReading):
    """L' as the contract ranks by it: integers from INT8 query codes, 8 bits behind the point."""

    name = "L'"

    def products(
        self, layer: LayerQueries, segments: Sequence[SegmentShadow], spec: KernelSpec
    ) -> torch.Tensor:
        """Take the contract's own products; see `KeyReading`."""
        scaled = [scale_query(one.numpy(), layer.scaling, spec) for one in layer.queries]
        parts = []
        for segment in segments:
            found = read_codes(segment.shadow, 0, segment.tokens, spec)
            own = [
                aligned_products(encode_scaled_query(one, segment.statistics, spec), found, spec)
                for one in scaled
            ]
            parts.append(torch.from_numpy(np.stack(own, axis=1).astype(np.float32)))
        products = torch.cat(parts, dim=-1) * _ALIGNED_UNIT
        return products.view(spec.kv_heads, spec.group_size, *products.shape[1:])


class OwnKeyCodes(KeyReading):
    """Codes of the keys made apart from the shadow, which no version of the contract has.

    Parameters
    ----------
    form
        How they are coded.
    """

    def __init__(self, form: ValueForm) -> None:
        self.name = f"own, {form.name}"
        self._form = form

    def products(
        self, layer: LayerQueries, segments: Sequence[SegmentShadow], spec: KernelSpec
    ) -> torch.Tensor:
        """Decode codes of another form; see `KeyReading`."""
        parts = []
        for segment in segments:
            own = layer.keys[segment.base_position : segment.base_position + segment.tokens]
            parts.append(self._form.decoded(own.float(), segment.statistics))
        return replace(layer, keys=torch.cat(parts)).inner_products()
