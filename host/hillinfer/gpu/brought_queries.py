# SPDX-License-Identifier: Apache-2.0
"""Predicted queries on their way from a GPU to the thread that scores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from hillinfer.gpu.copy_lane import CopyLane
from hillinfer.gpu.staging_ring import StagingRing


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
