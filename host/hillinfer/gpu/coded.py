# SPDX-License-Identifier: Apache-2.0
"""Attention over exact rows and coded tokens in a GPU's memory (contract, section 16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.torch_coded import TorchCodedAttention, TorchCodedTokens, unpack_code_rows
from hillinfer.gpu.copies import IncomingRows, StagedStates
from hillinfer.gpu.staging import CopyLane, StagingRing
from hillinfer.native.library import native_library
from hillinfer.scoring.coded import Weighed
from hillinfer.shadow.values import SegmentValues
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.value_layout import code_row_bytes

_ALIGNED_BYTES = 4


@dataclass(frozen=True)
class CodedSet:
    """The coded tokens of a set, on the host.

    Parameters
    ----------
    positions
        int64, ascending.
    code_rows
        uint64 addresses of their code rows, exponents behind.
    weighed
        L' of all query heads, and invalid keys.
    """

    positions: NDArray[np.int64]
    code_rows: NDArray[np.uint64]
    weighed: Weighed


class StagedCoded:
    """Brings rows, codes and L' to a GPU and attends there, with the bits of any execution.

    The host weighs: it has the key shadow. What goes to the GPU of a coded token is its code row,
    half a byte per channel, and 4 bytes of L' for each query head.

    Parameters
    ----------
    lane, ring
        Copy, and hold what is copied.
    states
        Takes keys and values out of rows.
    row_bytes
        Of a row.
    """

    def __init__(
        self, lane: CopyLane, ring: StagingRing, states: StagedStates, row_bytes: int
    ) -> None:
        self._lane = lane
        self._ring = ring
        self._states = states
        self._row_bytes = row_bytes
        self._attention: TorchCodedAttention | None = None

    def attend(
        self,
        scaled: torch.Tensor,
        like: torch.Tensor,
        rows: tuple[NDArray[np.int64], NDArray[np.uint64]],
        exact: Sequence[NDArray[np.int64]],
        coded: Sequence[CodedSet],
        own: Sequence[SegmentValues],
        spec: KernelSpec,
    ) -> torch.Tensor:
        """Attend to the sets of a layer, one for all heads or one per KV head.

        Parameters
        ----------
        scaled
            q', float32 of shape (query_heads, head_dim), on the host.
        like
            Any tensor beside the model.
        rows
            Positions of the exact tokens of all sets, ascending, and addresses of their rows.
        exact, coded
            The exact and the coded tokens of each set.
        own
            Of each segment's values.
        spec
            Shape.

        Returns
        -------
        float32 of shape (query_heads, head_dim), beside the model.
        """
        if self._attention is None:
            self._attention = TorchCodedAttention(like.device)
        query = scaled.to(like.device)
        union, addresses = rows
        held = self._exact(addresses)
        keys, values = (one.transpose(0, 1) for one in self._states.split(held, query))
        if len(exact) == 1:
            tokens = self._coded(coded[0], own, spec, like.device)
            return self._attention.attend(query, keys, values, tokens)
        group, out = len(query) // len(exact), []
        for head, (some, of) in enumerate(zip(exact, coded, strict=True)):
            inside = torch.from_numpy(np.searchsorted(union, some)).to(like.device)
            only, heads = slice(head, head + 1), slice(head * group, (head + 1) * group)
            tokens = [_of_head(one, only, heads) for one in self._coded(of, own, spec, like.device)]
            states = keys[inside][:, only], values[inside][:, only]
            out.append(self._attention.attend(query[heads], *states, tokens))
        return torch.cat(out)

    # --- inside ----------------------------------------------------------------------------

    def _exact(self, addresses: NDArray[np.uint64]) -> torch.Tensor:
        """Return rows, uint8 (rows, row_bytes), beside the model."""
        return self._brought(addresses, self._row_bytes)

    def _brought(self, addresses: NDArray[np.uint64], row_bytes: int) -> torch.Tensor:
        incoming = IncomingRows(self._lane, self._ring, len(addresses), row_bytes)
        for first in range(0, len(addresses), incoming.piece_rows):
            piece = addresses[first : first + incoming.piece_rows]
            incoming.fill(len(piece), partial(native_library().copy_rows, piece))
        return self._states.taken(incoming)

    def _weights(self, weighed: Weighed) -> tuple[torch.Tensor, torch.Tensor]:
        """Return L', int32 (query_heads, tokens), and invalid keys, bool (tokens, kv_heads)."""
        heads, count = weighed.aligned.shape
        size = _ALIGNED_BYTES * heads
        incoming = IncomingRows(self._lane, self._ring, count, size + len(weighed.invalid))
        for first in range(0, count, incoming.piece_rows):
            part = slice(first, min(first + incoming.piece_rows, count))

            def write(out: NDArray[np.uint8], part: slice = part) -> int:
                out[:, :size] = np.ascontiguousarray(weighed.aligned[:, part].T).view(np.uint8)
                out[:, size:] = weighed.invalid[:, part].T
                return len(out)

            incoming.fill(part.stop - part.start, write)
        both = self._states.taken(incoming)
        return both[:, :size].contiguous().view(torch.int32).T, both[:, size:] != 0

    def _coded(
        self,
        coded: CodedSet,
        own: Sequence[SegmentValues],
        spec: KernelSpec,
        device: torch.device,
    ) -> list[TorchCodedTokens]:
        """Return the coded tokens of a set, segment by segment."""
        if not len(coded.positions):
            return []
        rows = self._brought(coded.code_rows, code_row_bytes(spec) + spec.kv_heads)
        codes, exponents = unpack_code_rows(rows, spec)
        aligned, invalid = self._weights(coded.weighed)
        edges = np.searchsorted(coded.positions, np.arange(len(own) + 1) * spec.segment_tokens)
        (numbers,) = np.nonzero(np.diff(edges))
        # At once for all segments: a copy takes as long however little it is.
        taken = [own[number].statistics for number in numbers.tolist()]
        c = torch.from_numpy(np.stack([one.exponents for one in taken])).to(device)
        means = torch.from_numpy(np.stack([one.means for one in taken])).to(device)
        parts = [slice(*edges[number : number + 2].tolist()) for number in numbers.tolist()]
        return [
            TorchCodedTokens(
                aligned[:, part], invalid[part], codes[part], exponents[part], c[at], means[at]
            )
            for at, part in enumerate(parts)
        ]


def _of_head(tokens: TorchCodedTokens, head: slice, heads: slice) -> TorchCodedTokens:
    """Return what one KV head and its query heads have of coded tokens."""
    return TorchCodedTokens(
        tokens.aligned[heads],
        tokens.invalid_keys[:, head],
        tokens.codes[:, head],
        tokens.exponents[:, head],
        tokens.channel_exponents[head],
        tokens.means[head],
    )
