# SPDX-License-Identifier: Apache-2.0
"""Gives a device the places of rows on its drive, to make shadows or cast keys (HillInfer, CEC)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import FilePiece, StoredRows
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.slots import given_rows
from hillinfer.drive.regions import OWN_FILE, Placement
from hillinfer.errors import DeviceError
from hillinfer.shadow.segments import ResidentShadows, Segment, SegmentLayer
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# Returns row numbers by positions, int64.
RowsOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]
# Returns keys of a range of positions, float16 (tokens, kv_heads, head_dim).
KeysOf = Callable[[int, int], torch.Tensor]


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
    places
        Where rows lie; None where a device cannot read them.
    """

    def __init__(
        self,
        device: DeviceShadows,
        residents: ResidentShadows,
        places: RowPlaces | None,
        spec: KernelSpec,
    ) -> None:
        self._device = device
        self._residents = residents
        self._places = places
        self._spec = spec
        self._size = spec.segment_tokens
        residents.wait_for_rows(self._size)

    def make(
        self,
        layer: int,
        segments: Sequence[Segment],
        rows: RowsOf,
        settled: int,
        keys: KeysOf,
    ) -> None:
        """Let the device take what waits for it of a layer, as far as rows have left the tail.

        Parameters
        ----------
        rows
            Returns the numbers of rows by positions.
        settled
            Positions below it have left the tail.
        keys
            Reads keys of positions below it.
        """
        together = self._device.rows_together
        waiting = [*self._waiting(layer, segments, settled)]
        for start in range(0, len(waiting), together or 1):
            batch: list[tuple[SegmentLayer, StoredRows]] = []
            for number, own in waiting[start : start + (together or 1)]:
                base = number * self._size
                pieces = self._pieces(layer, base, rows) if together else None
                if pieces is None:
                    self._send(own, base, keys)
                    continue
                assert own.resident is not None
                assert own.statistics is not None
                stored = StoredRows(own.resident.slot, base, own.statistics, pieces)
                batch.append((own, stored))
            if batch:
                self._residents.made([own for own, _ in batch], [stored for _, stored in batch])

    def _pieces(self, layer: int, base: int, rows: RowsOf) -> list[FilePiece] | None:
        """Return where the rows of a segment lie; None where a device cannot read them."""
        if self._places is None:
            return None
        first = np.arange(base, base + self._size, GROUP_TOKENS)
        return self._places.of(layer, rows(first) // GROUP_TOKENS)

    def _send(self, own: SegmentLayer, base: int, keys: KeysOf) -> None:
        """Send the device the shadow of a segment, from some position on."""
        self._residents.send(own)

    def _waiting(
        self, layer: int, segments: Sequence[Segment], settled: int
    ) -> Iterator[tuple[int, SegmentLayer]]:
        for number, segment in enumerate(segments[: settled // self._size]):
            own = segment.layers[layer]
            if self._residents.waits(own):
                yield number, own


class DeviceCasting(DeviceMaking):
    """Gives a device the rows of full segments, whose keys it casts when it scores them.

    Those that it cannot read on the drive the host reads, and hands over their keys.
    """

    def _send(self, own: SegmentLayer, base: int, keys: KeysOf) -> None:
        if self._device.lost:
            return
        assert own.resident is not None
        assert own.statistics is not None
        known = self._spec, own.resident.slot, base, own.statistics
        try:
            with given_rows(*known, keys(base, base + self._size)) as given:
                self._residents.made([own], [given])
        except DeviceError as error:
            self._device.lose(error)


def making_of(
    device: DeviceShadows,
    residents: ResidentShadows,
    places: RowPlaces | None,
    spec: KernelSpec,
) -> DeviceMaking | None:
    """Return what lets a device take rows; None where it takes none.

    Parameters are those of `DeviceMaking`.
    """
    if not device.rows_together:
        return None
    if device.takes_rows:
        return DeviceCasting(device, residents, places, spec)
    return None if places is None else DeviceMaking(device, residents, places, spec)
