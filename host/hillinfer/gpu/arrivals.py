# SPDX-License-Identifier: Apache-2.0
"""New tokens' rows and predicted queries on their way from a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.errors import CacheUseError
from hillinfer.gpu.copy_lanes import CopyLane
from hillinfer.gpu.staging import StagingRing
from hillinfer.kv.sequence import Sequence

# --- Packed rows ---


def packed_rows(keys: torch.Tensor, values: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Return what `RowLayout.pack` writes, as a tensor beside the model.

    Parameters
    ----------
    keys, values
        Stored type, (kv_heads, tokens, head_dim).
    row_bytes
        Bytes of a row.

    Returns
    -------
    uint8 (tokens, row_bytes), contiguous.
    """
    tokens = keys.shape[1]
    parts = [states.transpose(0, 1).reshape(tokens, -1) for states in (keys, values)]
    filled = 2 * parts[0].shape[1]
    padding = keys.new_zeros((tokens, row_bytes // keys.element_size() - filled))
    return torch.cat([*parts, padding], dim=1).view(torch.uint8)


# --- New tokens' rows ---


@dataclass(frozen=True, eq=False)
class _Arriving:
    """A row, the buffer it arrives in, and its place in the open group."""

    row: torch.Tensor
    buffer: int
    place: NDArray[np.uint8]


class Arrivals:
    """Lets a decode step go on while its keys and values come back (HillInfer, section 4.3).

    The model's GPU attends to the new row where it was made; the host wants it for scoring and for
    the drive in later steps. So the place in the open group is taken at once and filled when
    somebody is about to look, or when no buffer is free. One thread calls.

    Parameters
    ----------
    lane, ring
        What copies, and through which buffers, of one row each.
    """

    def __init__(self, lane: CopyLane, ring: StagingRing) -> None:
        self._lane = lane
        self._ring = ring
        self._arriving: dict[tuple[int, int], _Arriving] = {}
        self._failure: Exception | None = None

    def begin(
        self, layer: int, sequence: Sequence, row: torch.Tensor, place: NDArray[np.uint8]
    ) -> None:
        """Begin to bring a row back.

        Parameters
        ----------
        layer, sequence
            Whose newest token it is.
        row
            uint8 (1, row_bytes) beside the model.
        place
            uint8 (row_bytes,), where it belongs.
        """
        if len(self._arriving) == len(self._ring.buffers):
            self._fill(next(iter(self._arriving)))
        buffer = self._ring.acquire()
        try:
            staged = torch.from_numpy(self._ring.buffers[buffer])[None]
            self._ring.arrive(buffer, self._lane.from_gpu(staged, row))
        except BaseException:
            self._ring.give(buffer)
            raise
        self._arriving[layer, id(sequence)] = _Arriving(row, buffer, place)

    def newest(self, layer: int, sequence: Sequence) -> torch.Tensor | None:
        """Return the row that is on its way, uint8 (1, row_bytes) beside the model, if one is."""
        arriving = self._arriving.get((layer, id(sequence)))
        return None if arriving is None else arriving.row

    def wait(self) -> None:
        """Wait until no row is on its way; `settle` tells what went wrong."""
        while self._arriving:
            self._fill(next(iter(self._arriving)))

    def settle(self) -> None:
        """Wait until every row is in its place.

        Raises
        ------
        CacheUseError
            Where one never came: from then on always, because the cache has a hole.
        """
        self.wait()
        if self._failure is not None:
            raise CacheUseError(
                f"a new token's row did not come back from the GPU ({self._failure}): this cache "
                "is no longer whole; close it and read the prompt again with another"
            ) from self._failure

    def _fill(self, key: tuple[int, int]) -> None:
        arriving = self._arriving[key]
        # An interrupt leaves everything as it is: who waits next fills it.
        try:
            arriving.place[:] = self._ring.arrived(arriving.buffer)
        except Exception as error:
            self._failure = error
        self._ring.give(arriving.buffer)
        del self._arriving[key]


# --- Predicted queries ---


class BroughtQueries:
    """Lets the thread that drives the model go on; the one that scores waits for the query.

    Parameters
    ----------
    lane, ring
        What copies, and through which buffers, of one query each.
    """

    def __init__(self, lane: CopyLane, ring: StagingRing) -> None:
        self._lane = lane
        self._ring = ring
        self._under_way: set[int] = set()

    def bring(self, query: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to bring a query back.

        Parameters
        ----------
        query
            (query_heads, head_dim) beside the model.

        Returns
        -------
        What returns it, float32 on the host, once it is there; called once, from any thread.
        """
        wide = query.float().contiguous()
        buffer = self._ring.acquire_free()
        if buffer is None:
            # A batch announces as many queries as it has sequences.
            here = wide.cpu()
            return lambda: here
        place = torch.from_numpy(self._ring.buffers[buffer][: wide.numel() * 4])
        try:
            copy = self._lane.from_gpu(place.view(torch.float32).view(wide.shape), wide)
        except BaseException:
            self._ring.give(buffer)
            raise
        self._ring.arrive(buffer, copy)
        self._under_way.add(buffer)
        return lambda: self._arrived(buffer, wide.shape)

    def settle(self) -> None:
        """Free the buffers of queries that nobody asked for; nobody is about to."""
        while self._under_way:
            # What went wrong is told to whoever asks for the query.
            with suppress(Exception):
                self._arrived(next(iter(self._under_way)), torch.Size([0]))

    def _arrived(self, buffer: int, shape: torch.Size) -> torch.Tensor:
        # An interrupt leaves the buffer as it is: `settle` frees it.
        try:
            items = self._ring.arrived(buffer).view(np.float32)[: shape.numel()].copy()
        except Exception:
            self._free(buffer)
            raise
        self._free(buffer)
        return torch.from_numpy(items).view(shape)

    def _free(self, buffer: int) -> None:
        self._under_way.discard(buffer)
        self._ring.give(buffer)
