# SPDX-License-Identifier: Apache-2.0
"""Which segments a device holds, and which the host scores."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.device import (
    DeviceSegment,
    ScoredTokens,
    ScoringDevice,
    StoredRows,
    StoredShadow,
    queries_each,
)
from hillinfer.errors import DeviceError
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout
from hillinfer.statistics import Counters
from hillinfer_model.beats import Beats
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# --- The host's share ---


class HostShare(Protocol):
    """Decides how segments are shared between host and device; asked once per segment."""

    def host_segments(self, segments: int) -> int:
        """Return how many of the first segments the host is to score."""
        ...

    def note(
        self, host_scored: int, host_selected: int, device_scored: int, device_selected: int
    ) -> None:
        """Learn, after a selection, how many tokens each side scored and how many were selected."""
        ...


class GivenBeta:
    """A `HostShare` of one β for good.

    β is host-scored to device-scored segments, Mc/Ms (HillInfer equation 4); 0 gives the device
    every full group.
    """

    def __init__(self, beta: float) -> None:
        self._share = beta / (1 + beta)

    def host_segments(self, segments: int) -> int:
        """Return the share, rounded."""
        return int(segments * self._share + 0.5)

    def note(
        self, host_scored: int, host_selected: int, device_scored: int, device_selected: int
    ) -> None:
        """Learn nothing."""


# --- Segments that a device holds ---

STAGING_SLOTS = 16


class Pace(StrEnum):
    """Whether how long a device takes says anything of a device."""

    REAL = "real"
    EMULATED = "emulated"


@dataclass
class Resident:
    """What a device holds of one segment in one layer.

    Its tokens are whole groups; `probes` is the host's copy of the probe tokens among them.
    """

    slot: int
    tokens: int
    probes: ProbeShadow


class DeviceShadows:
    """Hands out a device's slots and keeps what lies in them in step with the host.

    β is host-scored to device-scored segments, Mc/Ms (HillInfer equation 4); 0 gives the device
    every full group, and so does None until `share_by` says otherwise. `report` is told once why
    the device was lost; `pace` says whether its speed is a device's own.

    `staging` are slots for shadows that come from the drive for one launch. `takes_rows` says
    whether it holds rows of whole segments instead of shadows, and casts their keys; `lost`, that
    nothing of what it held is there any more. What it scored, for each query, `launches`,
    `scored_segments` and `scored_tokens` count, launches of several queries `shared_launches`,
    those that made shadows of rows `making_launches`, and bytes that it read of files by itself
    `read_bytes`.
    """

    def __init__(
        self,
        spec: KernelSpec,
        device: ScoringDevice,
        beta: float | None,
        report: Callable[[DeviceError], None],
        pace: Pace = Pace.EMULATED,
    ) -> None:
        self._spec = spec
        self.device = device
        self._share: HostShare = GivenBeta(beta or 0.0)
        # By segment number, for all layers and sequences: what is placed stays.
        self._on_host: list[bool] = []
        self._report = report
        self.pace = pace
        self._layout = ShadowLayout(spec)
        self.lost = False
        self.takes_rows = spec.key_mode is KeyMode.FP16
        # The first slots take shadows that come from the drive for one launch.
        staging = 0 if self.takes_rows else min(STAGING_SLOTS, device.slots // 2)
        self.staging = range(staging if staging and self._has_room(staging - 1) else 0)
        self._free: list[int] = []
        self._fresh = self.staging.stop
        # Asking a card for room takes time, and every token asks.
        self._full = False
        self.count_anew()

    def take(self, number: int) -> Resident | None:
        """Return room for a segment of some number, or None where the host is to score it."""
        return self.room(number) if self.wants(number) else None

    def room(self, number: int) -> Resident | None:
        """Return room for a segment of some number, whoever is to score it, or None."""
        if self.lost:
            return None
        if self._free:
            slot = heapq.heappop(self._free)
        elif not self._full and self._fresh < self.device.slots and self._has_room(self._fresh):
            slot, self._fresh = self._fresh, self._fresh + 1
        else:
            self._full = True
            return None
        return Resident(slot, 0, ProbeShadow(self._layout, number))

    def share_by(self, share: HostShare) -> None:
        """Let something else decide from here on; segments that are placed stay where they are."""
        self._share = share

    def note_selected(
        self, host_scored: int, host_selected: int, device_scored: int, device_selected: int
    ) -> None:
        """Learn what was selected of what each side scored; see `HostShare`."""
        self._share.note(host_scored, host_selected, device_scored, device_selected)

    def _has_room(self, slot: int) -> bool:
        try:
            return self.device.has_room(slot)
        except DeviceError as error:
            self.lose(error)
            return False

    def wants(self, number: int) -> bool:
        """Say whether the device is to score the segment of some number."""
        if self.lost:
            return False
        while len(self._on_host) <= number:
            count = self._share.host_segments(len(self._on_host) + 1)
            self._on_host.append(count > sum(self._on_host))
        return not self._on_host[number]

    def load(self, shadows: Sequence[StoredShadow]) -> None:
        """Bring shadows from the drive into staging slots; see `ScoringDevice.load`."""
        if self.lost:
            raise DeviceError("the device is lost")
        self.device.load(shadows)
        self.read_bytes += len(shadows) * self._spec.segment_bytes

    @property
    def rows_together(self) -> int:
        """Of how many segments' rows it makes shadows at once; 0 where it makes none."""
        return 0 if self.lost else self.device.rows_together

    @property
    def queries_together(self) -> int:
        """Queries that one pass over its shadows scores at most."""
        return self.device.queries_together

    def make(
        self, residents: Sequence[Resident], rows: Sequence[StoredRows], shadows: Sequence[Beats]
    ) -> None:
        """Let the device make shadows of whole segments, or send them, or lose it.

        Where it takes rows, it keeps them instead. `residents` are what the device has of each
        segment, which is nothing yet, and `rows` where its rows are; `shadows` are what it will
        make, of which probe tokens are kept.
        """
        if self.lost:
            return
        tokens = self._spec.segment_tokens
        try:
            made = self.device.make(rows)
        except DeviceError as error:
            self.lose(error)
            return
        if not made:
            for resident, shadow in zip(residents, shadows, strict=True):
                self.update(resident, shadow, tokens)
            return
        self.making_launches += not self.takes_rows
        self.read_bytes += sum(one.drive_bytes for one in rows)
        for resident, shadow in zip(residents, shadows, strict=True):
            resident.probes.take(shadow, 0, tokens)
            resident.tokens = tokens

    def expect(self, segments: int) -> None:
        """Place as many segments by the share of all of them, not by that of each beginning.

        A share that leaves the host alone up to some length would have given it too many by then.
        """
        if self.lost or segments <= len(self._on_host):
            return
        hosts, placed = self._share.host_segments(segments), sum(self._on_host)
        for count in range(len(self._on_host) + 1, segments + 1):
            # Rounded, and spread over the whole.
            own = (2 * hosts * count + segments) // (2 * segments) > placed
            self._on_host.append(own)
            placed += own

    def give(self, resident: Resident) -> None:
        """Let a slot be used for another segment."""
        self._full = False
        heapq.heappush(self._free, resident.slot)

    def update(self, resident: Resident, shadow: NDArray[np.uint8], coded_tokens: int) -> None:
        """Bring the device up to date with a shadow's full groups, or lose it.

        One that takes rows is sent no codes.
        """
        groups = coded_tokens // GROUP_TOKENS
        held = resident.tokens // GROUP_TOKENS
        if groups <= held or self.lost or self.takes_rows:
            return
        first, stop = held * self._spec.group_beats, groups * self._spec.group_beats
        try:
            self.device.write(resident.slot, first, shadow[first:stop])
        except DeviceError as error:
            self.lose(error)
            return
        resident.probes.take(shadow, resident.tokens, groups * GROUP_TOKENS)
        resident.tokens = groups * GROUP_TOKENS

    def read(self, resident: Resident, into: NDArray[np.uint8]) -> bool:
        """Fill `into` with what the device holds of a segment; False where it is lost."""
        if self.lost:
            return False
        beats = resident.tokens // GROUP_TOKENS * self._spec.group_beats
        try:
            self.device.read(resident.slot, into[:beats])
        except DeviceError as error:
            self.lose(error)
            return False
        return True

    def score(
        self,
        scope: Scope,
        queries: Beats,
        segments: Sequence[DeviceSegment],
        ahead: Sequence[StoredShadow] = (),
    ) -> Iterator[ScoredTokens]:
        """Launch; see `ScoringDevice.score`."""
        if self.lost:
            raise DeviceError("the device is lost")
        each = queries_each(self._spec, queries, len(segments))
        scoring = self.device.score(scope, queries, segments, ahead)
        return self._counted(scoring, len(segments), each, len(ahead))

    def _counted(
        self, scoring: Iterator[ScoredTokens], segments: int, each: int, ahead: int
    ) -> Iterator[ScoredTokens]:
        """Count what the device really gave: it may fail in the middle."""
        for part in scoring:
            self.scored_tokens += each * part.tuples.shape[1]
            yield part
        self.launches += 1
        self.shared_launches += each > 1
        self.scored_segments += each * segments
        self.read_bytes += ahead * self._spec.segment_bytes

    def count_anew(self) -> None:
        """Forget what was counted so far: what was only measured is no part of a run."""
        self.launches = self.shared_launches = self.making_launches = 0
        self.scored_tokens = self.scored_segments = 0
        self.read_bytes = 0

    def count_into(self, counters: Counters) -> None:
        """Let the cache's counters say what the device did so far."""
        counters.kernel_launches = self.launches
        counters.device_scored_segments = self.scored_segments
        counters.device_scored_tokens = self.scored_tokens
        counters.make_shadow_launches = self.making_launches
        counters.shared_launches = self.shared_launches
        counters.device_read_bytes = self.read_bytes

    def lose(self, error: DeviceError) -> None:
        """Give the device up, once."""
        if not self.lost:
            self.lost = True
            self.device.close()
            self._report(error)

    def close(self) -> None:
        """Let go of the device; harmless when done twice."""
        self.device.close()
