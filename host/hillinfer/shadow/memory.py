# SPDX-License-Identifier: Apache-2.0
"""Where shadows lie: in DRAM as far as the budget goes, on the drive from there on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.drive.shared_files import ShadowBase
from hillinfer.memory_budget import Accountant, Part
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout, probe_bytes
from hillinfer.scoring.scorer import SegmentShadow, StreamedShadow
from hillinfer.shadow.arena import ComingShadows, ShadowArena
from hillinfer.shadow.segments import (
    DeviceMaking,
    ResidentShadows,
    RowPlaces,
    Segment,
    SegmentLayer,
    making_of,
)
from hillinfer.shadow.store import (
    NO_SINKS,
    LeavingShadows,
    ShadowStore,
    ShadowStream,
    statistics_bytes,
)
from hillinfer.statistics import Counters
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.offsets import RECENT_TOKENS


class ShadowMemory:
    """Gives shadows room and sends those that the budget has none for to the drive, once each.

    Open segments are always in DRAM: they are written to at every step.

    Parameters
    ----------
    limit_bytes
        Most bytes of full shadows in DRAM, the copies of their probe tokens aside.
    announce
        Called once, before the first shadow goes to the drive.
    device
        Holds shadows that the host need not, or None.
    value_bytes
        What statistics of a segment's values take beside those of its keys.

    Attributes
    ----------
    full_bytes
        Of full shadows in DRAM, which `limit_bytes` bounds.
    coming
        Knows of segments that are being made one after another.
    has_device
        Whether a device may hold shadows.
    making
        Lets the device take rows; None where it takes none.
    """

    def __init__(
        self,
        store: ShadowStore,
        spec: KernelSpec,
        limit_bytes: int,
        accountant: Accountant,
        counters: Counters,
        announce: Callable[[], None],
        device: DeviceShadows | None = None,
        value_bytes: int = 0,
    ) -> None:
        self._device = device
        self._staging: NDArray[np.uint8] | None = None
        self._store = store
        self._layout = ShadowLayout(spec)
        self._size = spec.segment_tokens
        self._limit_bytes = limit_bytes
        self._statistics_bytes = statistics_bytes(spec) + value_bytes
        self._accountant = accountant
        self._counters = counters
        self._announce = announce
        self.full_bytes = 0
        # How often anything but the coded tokens of an open segment has changed, so that who
        # described segments knows whether it still holds.
        self.changes = 0
        self._stream: ShadowStream | None = None
        self.coming = ComingShadows()
        self._leaving = LeavingShadows(store, counters, self._forget_written, self._drop_probes)
        self._residents = ResidentShadows(device, accountant, self._staging_buffer)
        self.making: DeviceMaking | None = None
        self.has_device = device is not None

    def limit_to(self, limit_bytes: int) -> None:
        """Let no more full shadows than that stay in DRAM from here on; those that do, stay."""
        self._limit_bytes = limit_bytes

    def raise_limit(self, limit_bytes: int) -> None:
        """Let more full shadows stay in DRAM from here on; what is on the drive stays there."""
        self._limit_bytes = max(self._limit_bytes, limit_bytes)

    def settle(self) -> None:
        """Wait until every shadow that leaves DRAM is on the drive."""
        self._leaving.settle()

    def segment(self, layers: int, before: list[Segment]) -> Segment:
        """Return an empty segment, whose shadows will lie beside those of the ones before it."""
        self.changes += 1
        every = range(0 if before else layers)
        arenas = [own.arena for own in before[-1].layers] if before else []
        arenas += [ShadowArena(self._store.slot_bytes) for _ in every]
        self.coming.tell(arenas)
        return Segment(arenas)

    def shadows(
        self, layer: int, segments: list[Segment], remake: Callable[[int], NDArray[np.uint8]]
    ) -> list[SegmentShadow]:
        """Return what is coded of a layer, to be scored in this order.

        Parameters
        ----------
        remake
            Codes the segment of a number again after the device that held it was lost.
        """
        made: list[SegmentShadow] = []
        on_drive: list[int] = []
        tokens = 0
        if self._device is not None:
            tokens = sum(segment.layers[layer].coded_tokens for segment in segments)
        for number, segment in enumerate(segments):
            own, base = segment.layers[layer], number * self._size
            if own.statistics is None:
                break
            if own.resident is not None:
                self.leave_to_device(own, base + self._size, tokens)
                made.append(self._residents.view(base, own, partial(remake, number)))
                continue
            # Looked at once: the thread that attends may drop it once the drive has it.
            view, shadow = own.view, own.shadow
            if view is None and shadow is not None:
                view = self._view(base, own, shadow)
            if view is not None:
                made.append(view)
                continue
            assert own.slot is not None
            place = None
            if own.probes is not None and self._device is not None and not self._device.lost:
                place = self._store.place(own.slot)
            read = partial(self.whole, own)
            if place is None:
                on_drive.append(own.slot)
                read = partial(self._streaming().shadow, own.slot)
            made.append(
                StreamedShadow(base, own.coded_tokens, own.statistics, read, place, own.probes)
            )
        if on_drive:
            self._streaming().begin(on_drive)
        return made

    def words(self, layer: int, segments: list[Segment]) -> array[int] | None:
        """Return the native library's descriptors of a layer's segments, five words each.

        None where any of them lies elsewhere than in DRAM, or in pieces. The last word is how many
        tokens of the last one are coded, which the library counts on.
        """
        words = array("q")
        for segment in segments:
            own = segment.layers[layer]
            is_open = segment is segments[-1]
            if own.statistics is None or own.shadow is None or own.slot is not None:
                return None
            if own.coded_tokens != self._size and not is_open:
                return None
            statistics, probes = own.statistics, own.probes
            arrays: list[NDArray[Any]] = [own.shadow, statistics.exponents, statistics.means]
            if probes is not None:
                arrays.append(probes.shadow)
            if not all(one.flags.c_contiguous for one in arrays):
                return None
            addresses = [one.ctypes.data for one in arrays]
            words.extend(addresses if probes is not None else [*addresses, 0])
            words.append(own.coded_tokens)
        return words

    def _view(self, base: int, own: SegmentLayer, shadow: NDArray[np.uint8]) -> SegmentShadow:
        """Return a shadow in DRAM, and remember the view where the shadow is at rest there."""
        assert own.statistics is not None
        view = SegmentShadow(base, own.coded_tokens, shadow, own.statistics, own.probes)
        if view.probe_copy is not None and own.slot is None:
            own.view = view
        return view

    def let_device_make(self, places: RowPlaces | None) -> None:
        """Let the device take rows, from `places` where it can; called before anything is coded."""
        if self._device is not None:
            self.making = making_of(self._device, self._residents, places, self._layout.spec)

    def writable(self, own: SegmentLayer) -> NDArray[np.uint8]:
        """Return a segment's shadow in DRAM, made where it is missing."""
        self.changes += own.shadow is None or own.statistics is None
        if own.statistics is None:
            self._accountant.take(Part.OTHER, self._statistics_bytes)
        if own.shadow is None:
            try:
                own.shadow = self._buffer(own)
            except BaseException:
                if own.statistics is None:
                    self._accountant.give(Part.OTHER, self._statistics_bytes)
                raise
        return own.shadow

    def whole(self, own: SegmentLayer) -> NDArray[np.uint8]:
        """Return a shadow that is in DRAM or on the drive, valid until another is asked for."""
        if own.shadow is not None:
            return own.shadow
        assert own.slot is not None
        staging = self._staging_buffer()
        self._store.read(own.slot, staging).result()
        return staging

    def leave_to_device(self, own: SegmentLayer, end: int, tokens: int) -> None:
        """Drop DRAM's copy of a shadow that a device holds whole, once it is not looked at.

        The newest tokens are scored here at every step.

        Parameters
        ----------
        own, end
            A segment, and the position behind it.
        tokens
            Of the sequence, all of whose newest ones stay here.
        """
        if end + RECENT_TOKENS <= tokens:
            self._drop_copy(own)

    def leave_all_to_device(self, segment: Segment) -> None:
        """Drop DRAM's copies of what a device holds of a segment that is about to go.

        There is room for them or for a segment that is open again, and not for both.
        """
        for own in segment.layers:
            self._drop_copy(own)

    @contextmanager
    def base(self, base: ShadowBase) -> Iterator[int | None]:
        """Take the file of a saved shadow in while `adopt` is called with slots of it.

        Yields its first slot, or None where nothing can stay there. It is closed with the last
        shadow that lies in it.
        """
        first = self._store.add_base(base)
        try:
            yield first
        finally:
            if first is not None:
                self._store.let_base_go(first)

    def adopt(
        self,
        own: SegmentLayer,
        number: int,
        statistics: ChannelStatistics,
        coded_tokens: int,
        slot: int | None,
        read: Callable[[NDArray[np.uint8]], None],
    ) -> None:
        """Take over a shadow that a saved session holds.

        A full one goes to the device, to DRAM or stays where it lies: the first with room for it.

        Parameters
        ----------
        own, number
            Empty; of which segment.
        slot
            Where the shadow lies in a base of the store; there it stays where DRAM has no room.
            None where it lies in none.
        """
        self.changes += 1
        full = coded_tokens == self._size
        held = self.full_bytes + self._residents.waiting_bytes
        fits = held + self._store.slot_bytes <= self._limit_bytes
        if fits or not (full and self._residents.takes_rows):
            self._residents.claim(own, number)
        stays = full and own.resident is None and not fits
        try:
            if stays and slot is not None:
                self._streaming()
                self._accountant.take(Part.OTHER, self._statistics_bytes)
            else:
                memory = self.writable(own)
        except BaseException:
            if own.resident is not None:
                self._residents.free(own)
            raise
        # From here on `release` frees it, whatever fails.
        own.statistics = statistics
        if stays and slot is not None:
            self._store.share(slot)
            own.slot, own.coded_tokens = slot, coded_tokens
            self._keep_probes(own, number)
            return
        read(memory)
        own.coded_tokens = coded_tokens
        self.note_coded(own, number)
        # Rows of others are in no file of the cold pool's own.
        self._residents.send(own)

    def note_coded(self, own: SegmentLayer, number: int) -> None:
        """Learn that tokens of the segment of some number were coded.

        The device gets its full groups, where there is one with room; else a full shadow stays, or
        goes to the drive.
        """
        self._residents.claim(own, number)
        if self._residents.update(own):
            self.forget_lost(own, number)
        elif own.coded_tokens == self._size:
            self._note_full(own, number)

    def forget_lost(self, own: SegmentLayer, number: int) -> int:
        """Forget what a lost device held; return the tokens that must be coded again."""
        self.changes += 1
        if not self._residents.is_lost(own):
            return 0
        self._residents.free(own)
        if own.shadow is None:
            lost, own.coded_tokens = own.coded_tokens, 0
            return lost
        if own.coded_tokens == self._size:
            self._note_full(own, number)
        return 0

    def _note_full(self, own: SegmentLayer, number: int) -> None:
        """Learn that a shadow is complete: it stays, or goes to the drive."""
        self.changes += 1
        assert own.shadow is not None
        self.full_bytes += self._store.slot_bytes
        if self.full_bytes <= self._limit_bytes:
            self._copy_probes(own, NO_SINKS, own.shadow)
            return
        self._streaming()
        self._leaving.make_room()
        self._leaving.send(own)
        self._keep_probes(own, number)
        self._leaving.end_done()

    def clone(self, segment: Segment) -> Segment:
        """Return a copy of a segment that one sequence owns alone, all of it in DRAM."""
        self.changes += 1
        self._leaving.settle()
        copy = segment.clone()
        done: list[SegmentLayer] = []
        try:
            for own, original in zip(copy.layers, segment.layers, strict=True):
                own.drop_shadow()
                own.slot, own.resident, own.probes = None, None, None
                if own.statistics is None:
                    continue
                self._accountant.take(Part.OTHER, self._statistics_bytes)
                done.append(own)
                if own.coded_tokens:
                    own.shadow = self._copied(original)
                if own.shadow is None:
                    own.coded_tokens = 0
        except BaseException:
            for own in done:
                self._free(own)
            raise
        for own in copy.layers:
            if own.shadow is not None and own.coded_tokens == self._size:
                self.full_bytes += self._store.slot_bytes
        return copy

    def cut(self, segment: Segment, tokens: int) -> None:
        """Drop the codes from `tokens` on of a segment that one sequence owns alone."""
        self.changes += 1
        self._leaving.settle()
        # Whatever may fail comes first: an open segment lies in DRAM.
        for own in segment.layers:
            if own.slot is not None:
                own.shadow = self._copied(own)
                self._store.give(own.slot)
                own.slot = None
                self._drop_probes(own)
                self.full_bytes += self._store.slot_bytes
            elif own.shadow is None and own.coded_tokens:
                own.shadow = self._copied(own)
                self.forget_lost(own, 0)
        for own in segment.layers:
            own.view = None
            self._drop_probes(own)
            if self._counts_as_full(own) and tokens < self._size:
                self.full_bytes -= self._store.slot_bytes
            self._residents.cut(own, tokens)
            own.coded_tokens = min(own.coded_tokens, tokens)

    def release(self, segment: Segment) -> None:
        """Let go of a segment, which is freed with its last owner."""
        self.changes += 1
        segment.owners -= 1
        if segment.owners:
            return
        self._leaving.settle_quietly()
        for own in segment.layers:
            if self._counts_as_full(own):
                self.full_bytes -= self._store.slot_bytes
            if own.statistics is not None:
                self._free(own)

    def _buffer(self, own: SegmentLayer) -> NDArray[np.uint8]:
        with self._accountant.taking(Part.SHADOW, self._store.slot_bytes):
            return self._store.view(own.arena.take())

    def _copied(self, own: SegmentLayer) -> NDArray[np.uint8] | None:
        """Return a copy of a shadow in DRAM; None where the device that held it is lost."""
        copy = self._buffer(own)
        try:
            if own.shadow is not None:
                copy[:] = own.shadow
            elif own.slot is not None:
                self._store.read(own.slot, copy).result()
            elif not self._residents.read(own, copy):
                self._accountant.give(Part.SHADOW, self._store.slot_bytes)
                return None
        except BaseException:
            self._accountant.give(Part.SHADOW, self._store.slot_bytes)
            raise
        return copy

    def _counts_as_full(self, own: SegmentLayer) -> bool:
        """Say whether DRAM holds a full shadow that could go to the drive."""
        full = own.coded_tokens == self._size
        return full and own.shadow is not None and own.resident is None

    def _staging_buffer(self) -> NDArray[np.uint8]:
        if self._staging is None:
            self._accountant.take(Part.STAGING, self._store.slot_bytes)
            self._staging = self._store.buffer()
        return self._staging

    def _drop_copy(self, own: SegmentLayer) -> None:
        self.changes += 1
        if own.shadow is None or own.resident is None or own.resident.tokens < self._size:
            return
        own.drop_shadow()
        self._accountant.give(Part.SHADOW, self._store.slot_bytes)

    def _keep_probes(self, own: SegmentLayer, number: int) -> None:
        """Keep the probe tokens of a shadow that has a slot, if a device is to score it."""
        if self._device is not None and self._device.staging and self._device.wants(number):
            self._copy_probes(own, number, self.whole(own))

    def _copy_probes(self, own: SegmentLayer, number: int, shadow: NDArray[np.uint8]) -> None:
        """Keep a copy of a full shadow's probe tokens, which are looked at before the others."""
        self._accountant.take(Part.SHADOW, probe_bytes(self._layout.spec, number))
        own.probes = ProbeShadow.of(self._layout, number, shadow)

    def _drop_probes(self, own: SegmentLayer) -> None:
        self.changes += 1
        if own.probes is not None:
            self._accountant.give(Part.SHADOW, own.probes.shadow.nbytes)
            own.probes = None

    def _free(self, own: SegmentLayer) -> None:
        self.changes += 1
        self._accountant.give(Part.OTHER, self._statistics_bytes)
        if own.resident is not None:
            self._residents.free(own)
        if own.shadow is not None:
            own.drop_shadow()
            self._accountant.give(Part.SHADOW, self._store.slot_bytes)
        if own.slot is not None:
            self._store.give(own.slot)
            own.slot = None
        self._drop_probes(own)

    def _streaming(self) -> ShadowStream:
        if self._stream is None:
            self._accountant.take(Part.STAGING, self._store.streaming_bytes)
            self._announce()
            self._stream = ShadowStream(self._store, self._counters)
        return self._stream

    def _forget_written(self, own: SegmentLayer) -> None:
        self.changes += 1
        own.drop_shadow()
        self.full_bytes -= self._store.slot_bytes
        self._accountant.give(Part.SHADOW, self._store.slot_bytes)
