# SPDX-License-Identifier: Apache-2.0
"""The shadow of one segment in all layers: what it takes, who holds it, and what a device makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import FilePiece, ResidentShadow, StoredRows
from hillinfer.devices.device_shadows import DeviceShadows, Resident
from hillinfer.devices.slots import given_rows
from hillinfer.drive.regions import OWN_FILE, Placement
from hillinfer.errors import DeviceError
from hillinfer.memory_budget import Accountant, Part
from hillinfer.scoring.layout import ProbeShadow
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer.shadow.arena import ShadowArena
from hillinfer.shadow.values import SegmentValues
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# --- Segments ---


@dataclass(slots=True)
class SegmentLayer:
    """Codes and statistics of one segment in one layer (contract, section 1).

    Parameters
    ----------
    arena
        Where its shadow lies in DRAM, beside those of the layer's other segments.
    shadow
        uint8 of shape (segment_beats, 64) in DRAM; None where it is on the drive or not made yet.
    slot
        Where it lies in the `ShadowStore`; None where it was not written.
    resident
        What a device holds of it; None where it holds nothing.
    probes
        The probe tokens where it is full and at rest in DRAM, or lies on the drive and a device is
        to score it; else None.
    statistics
        None until it is full or first scored.
    coded_tokens
        Tokens coded so far.
    values
        Statistics of its values, taken when those of its keys are; None where no token is coded.
    view
        What scorers take of a full shadow at rest in DRAM: the same object at every step, so
        that they need to look at it only once.
    """

    arena: ShadowArena
    shadow: NDArray[np.uint8] | None = None
    slot: int | None = None
    resident: Resident | None = None
    probes: ProbeShadow | None = None
    statistics: ChannelStatistics | None = None
    coded_tokens: int = 0
    values: SegmentValues | None = None
    view: SegmentShadow | None = None

    def drop_shadow(self) -> None:
        """Forget what DRAM holds of it."""
        self.shadow, self.view = None, None


class Segment:
    """One segment in every layer, shared by the sequences that have it in common.

    Parameters
    ----------
    arenas
        Of each layer of the model.
    """

    def __init__(self, arenas: Iterable[ShadowArena]) -> None:
        self.layers = [SegmentLayer(arena) for arena in arenas]
        self.owners = 1

    def clone(self) -> Segment:
        """Return a segment that one sequence owns alone; its shadows are still the same arrays."""
        copy = Segment(())
        copy.layers = [replace(layer) for layer in self.layers]
        return copy


class ValueWords(NamedTuple):
    """What the library is told of a layer's values, and who has what that points to.

    Parameters
    ----------
    values
        Of each segment from the first one on.
    words
        Three words of each.
    """

    values: list[SegmentValues]
    words: bytes

    @classmethod
    def of(cls, values: list[SegmentValues]) -> ValueWords:
        """Return those of some segments."""
        return cls(values, b"".join([one.words for one in values]))


def known_values(layer: int, segments: Iterable[Segment]) -> list[SegmentValues]:
    """Return what there is of a layer's values, up to the first segment without statistics."""
    found: list[SegmentValues] = []
    for segment in segments:
        own = segment.layers[layer].values
        if own is None:
            break
        found.append(own)
    return found


def coded_tokens(layer: int, segments: Sequence[Segment], number: int) -> int:
    """Return the coded tokens of a layer's segment of some number, which may not be there yet."""
    own = segments[number : number + 1]
    return own[0].layers[layer].coded_tokens if own else 0


# --- Segments on a device ---


class ResidentShadows:
    """Takes and gives back a device's room for segments, one by one.

    Parameters
    ----------
    device
        Holds shadows that the host need not; None where there is none, and nothing is done then.
    staging
        Returns memory for one shadow, the same at each call.
    """

    def __init__(
        self,
        device: DeviceShadows | None,
        accountant: Accountant,
        staging: Callable[[], NDArray[np.uint8]],
    ) -> None:
        self._device = device
        self._accountant = accountant
        self._staging = staging
        # Tokens of a full segment where the device takes rows of those by itself.
        self._made_tokens = 0
        # Bytes in DRAM by slots of the device that are to get rows.
        self._waiting: dict[int, int] = {}
        self._waiting_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Of shadows that sessions brought to DRAM for a device that takes rows, still to come."""
        return self._waiting_bytes

    @property
    def takes_rows(self) -> bool:
        """Whether the device takes rows, for which codes in DRAM wait."""
        return self._device is not None and self._device.takes_rows

    def wait_for_rows(self, tokens: int) -> None:
        """Send the device no segment that becomes full at once, with so many tokens."""
        self._made_tokens = tokens

    def waits(self, own: SegmentLayer) -> bool:
        """Say whether the device has room for a full segment's shadow and is to make all of it."""
        return (
            own.resident is not None
            and own.resident.tokens == 0
            and own.shadow is not None
            and own.coded_tokens == self._made_tokens > 0
        )

    def claim(self, own: SegmentLayer, number: int) -> None:
        """Take room on the device for a segment of some number, and for its probes here."""
        if self._device is None or own.resident is not None or own.slot is not None:
            return
        resident = self._device.take(number)
        if resident is not None:
            try:
                self._accountant.take(Part.SHADOW, resident.probes.shadow.nbytes)
            except BaseException:
                self._device.give(resident)
                raise
        own.resident = resident

    def update(self, own: SegmentLayer) -> bool:
        """Send the device its full groups, or let them wait; return whether they are for it."""
        if self._device is None or own.resident is None:
            return False
        if not self.waits(own):
            self.send(own)
        return True

    def send(self, own: SegmentLayer) -> None:
        """Send the device the full groups of a segment that it has room for, if it has."""
        if self._device is not None and own.resident is not None:
            assert own.shadow is not None
            if self._device.takes_rows and self.waits(own):
                self._no_longer_waits(own.resident)
                self._waiting[own.resident.slot] = own.shadow.nbytes
                self._waiting_bytes += own.shadow.nbytes
            self._device.update(own.resident, own.shadow, own.coded_tokens)

    def made(self, owns: Sequence[SegmentLayer], rows: Sequence[StoredRows]) -> None:
        """Let the device take the rows of segments that wait for it."""
        residents = [own.resident for own in owns if own.resident is not None]
        shadows = [own.shadow for own in owns if own.shadow is not None]
        if self._device is not None:
            self._device.make(residents, rows, shadows)
            for resident in residents:
                if resident.tokens:
                    self._no_longer_waits(resident)

    def is_lost(self, own: SegmentLayer) -> bool:
        """Return whether a device held it that is no longer there."""
        return self._device is not None and own.resident is not None and self._device.lost

    def cut(self, own: SegmentLayer, tokens: int) -> None:
        """Keep full groups below `tokens` only; rows of whole segments are given once more."""
        if own.resident is None or self._device is None:
            return
        if tokens < own.coded_tokens:
            self._no_longer_waits(own.resident)
        if tokens >= own.resident.tokens:
            return
        whole = tokens // GROUP_TOKENS * GROUP_TOKENS
        own.resident.tokens = 0 if self._device.takes_rows else whole

    def read(self, own: SegmentLayer, into: NDArray[np.uint8]) -> bool:
        """Bring a shadow back; return False where no device holds it, or one that was lost."""
        if own.resident is None or self._device is None:
            return False
        return self._device.read(own.resident, into)

    def free(self, own: SegmentLayer) -> None:
        """Give the device's room back."""
        assert own.resident is not None
        assert self._device is not None
        self._no_longer_waits(own.resident)
        self._device.give(own.resident)
        self._accountant.give(Part.SHADOW, own.resident.probes.shadow.nbytes)
        own.resident = None

    def _no_longer_waits(self, resident: Resident) -> None:
        self._waiting_bytes -= self._waiting.pop(resident.slot, 0)

    def view(
        self, base: int, own: SegmentLayer, remake: Callable[[], NDArray[np.uint8]]
    ) -> ResidentShadow:
        """Return what scorers take of a segment that a device holds.

        Parameters
        ----------
        base
            Position of its first token.
        remake
            Codes it again after the device was lost.
        """
        assert own.resident is not None
        assert own.statistics is not None
        return ResidentShadow(
            base,
            own.coded_tokens,
            own.statistics,
            own.resident.slot,
            own.resident.tokens,
            own.resident.probes,
            own.shadow,
            partial(self._brought_back, own, remake),
        )

    def _brought_back(
        self, own: SegmentLayer, remake: Callable[[], NDArray[np.uint8]]
    ) -> NDArray[np.uint8]:
        """Return a shadow that DRAM does not hold, valid until another is brought back."""
        if own.shadow is not None:
            return own.shadow
        staging = self._staging()
        return staging if self.read(own, staging) else remake()


# --- Shadows that a device makes, and keys that it casts, of rows on its drive (HillInfer, CEC) ---

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
