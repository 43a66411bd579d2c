# SPDX-License-Identifier: Apache-2.0
"""Shadows that a device makes by itself of rows on its drive (HillInfer section 4.4, CEC)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.device import FilePiece, StoredRows
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.drive.regions import OWN_FILE, Placement
from hillinfer.shadow.segments import ResidentShadows, Segment, SegmentLayer
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# Returns row numbers by positions, int64.
RowsOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True)
class RowPlaces:
    """Where a device finds rows of full groups on the drive, as the model's keys and values.

    Parameters
    ----------
    placement
        Groups that lie in other files are not found.
    descriptor
        Returns that of a layer's own file.
    settle
        Waits until groups of a layer are on the drive.
    group_bytes
        Of a group in one layer.
    """

    placement: Placement
    descriptor: Callable[[int], int]
    settle: Callable[[int, NDArray[np.int64]], None]
    group_bytes: int

    def of(self, layer: int, groups: NDArray[np.int64]) -> list[FilePiece] | None:
        """Return where groups lie, one behind the other; None where a device cannot read them.

        `groups` is int64, one at least.
        """
        # Where a group went is known when it is written.
        self.settle(layer, groups)
        if (self.placement.of(layer, groups) != OWN_FILE).any():
            return None
        file, size = self.descriptor(layer), self.group_bytes
        ends = [0, *(np.flatnonzero(np.diff(groups) != 1) + 1).tolist(), len(groups)]
        return [
            FilePiece(file, int(groups[begin]) * size, (end - begin) * size)
            for begin, end in pairwise(ends)
        ]


class DeviceMaking:
    """Lets a device make the shadows of full segments from their rows.

    The host has coded these segments, too, because it looks at their probe tokens first.

    Parameters
    ----------
    device, residents
        Who holds shadows, and of which segments.
    places
        Where rows lie.
    spec
        Fixes sizes.
    """

    def __init__(
        self,
        device: DeviceShadows,
        residents: ResidentShadows,
        places: RowPlaces,
        spec: KernelSpec,
    ) -> None:
        self._device = device
        self._residents = residents
        self._places = places
        self._size = spec.segment_tokens
        residents.wait_for_rows(self._size)

    def make(
        self,
        layer: int,
        segments: Sequence[Segment],
        rows: RowsOf,
        settled: int,
    ) -> None:
        """Make what waits to be made of a layer, as far as its rows have left the tail.

        Parameters
        ----------
        layer, segments
            Of a sequence.
        rows
            Returns the numbers of rows by positions.
        settled
            Positions below it have left the tail.
        """
        together = self._device.rows_together
        waiting = [*self._waiting(layer, segments, settled)]
        for start in range(0, len(waiting), together or 1):
            batch: list[tuple[SegmentLayer, StoredRows]] = []
            for number, own in waiting[start : start + (together or 1)]:
                base = number * self._size
                first = np.arange(base, base + self._size, GROUP_TOKENS)
                pieces = self._places.of(layer, rows(first) // GROUP_TOKENS)
                if pieces is None or not together:
                    self._residents.send(own)
                    continue
                assert own.resident is not None
                assert own.statistics is not None
                stored = StoredRows(own.resident.slot, base, own.statistics, pieces)
                batch.append((own, stored))
            if batch:
                self._residents.made([own for own, _ in batch], [stored for _, stored in batch])

    def _waiting(
        self, layer: int, segments: Sequence[Segment], settled: int
    ) -> Iterator[tuple[int, SegmentLayer]]:
        for number, segment in enumerate(segments[: settled // self._size]):
            own = segment.layers[layer]
            if self._residents.waits(own):
                yield number, own
