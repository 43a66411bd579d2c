# SPDX-License-Identifier: Apache-2.0
"""The shadow of one segment in all layers: what it takes, and who holds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.device import ResidentShadow, StoredRows
from hillinfer.devices.device_shadows import DeviceShadows, Resident
from hillinfer.errors import ColdPoolError
from hillinfer.memory_budget import Accountant, Part
from hillinfer.scoring.layout import ProbeShadow
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer.shadow.arena import ShadowArena
from hillinfer.shadow.store import ShadowStore
from hillinfer.shadow.values import SegmentValues
from hillinfer.statistics import Counters
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS

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


# --- Shadows that are being written to the drive ---

# DRAM still holds them.
LEAVING_SHADOWS = 4


class LeavingShadows:
    """Writes full shadows, a few at a time, and tells when DRAM may forget one.

    Parameters
    ----------
    written
        Called with each that the drive has.
    stays
        Called with each that the drive did not take, and that has no slot any more.
    """

    def __init__(
        self,
        store: ShadowStore,
        counters: Counters,
        written: Callable[[SegmentLayer], None],
        stays: Callable[[SegmentLayer], None],
    ) -> None:
        self._store = store
        self._counters = counters
        self._written = written
        self._stays = stays
        self._leaving: deque[tuple[SegmentLayer, Future[None]]] = deque()

    def make_room(self) -> None:
        """Wait until another may leave.

        Raises
        ------
        ColdPoolError
            Where one that left before could not be written.
        """
        while len(self._leaving) >= LEAVING_SHADOWS:
            self._end_first()

    def send(self, own: SegmentLayer) -> None:
        """Begin to write a full shadow, for which there is room; it has a slot from here on."""
        assert own.shadow is not None
        slot = self._store.take()
        try:
            writing = self._store.write(slot, own.shadow)
        except BaseException:
            # A slot that nothing is written to must never be read.
            self._store.give(slot)
            raise
        own.slot = slot
        self._leaving.append((own, writing))
        self._counters.shadow_write_bytes += self._store.slot_bytes

    def end_done(self) -> None:
        """Tell of those that are written by now."""
        while self._leaving and self._leaving[0][1].done():
            self._end_first()

    def settle(self) -> None:
        """Wait for all; raises as `make_room`."""
        while self._leaving:
            self._end_first()

    def settle_quietly(self) -> None:
        """Wait for all; what was not written is told by whoever still needs it."""
        while self._leaving:
            with suppress(ColdPoolError):
                self._end_first()

    def _end_first(self) -> None:
        own, writing = self._leaving.popleft()
        try:
            writing.result()
        except BaseException:
            # Its codes stay in DRAM, so nothing is lost but the room that was hoped for.
            assert own.slot is not None
            self._store.give(own.slot)
            own.slot = None
            self._stays(own)
            raise
        self._written(own)
