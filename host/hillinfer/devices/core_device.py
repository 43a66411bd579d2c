# SPDX-License-Identifier: Apache-2.0
"""The device `core`: a processor core that stands for one near the drive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.device_options import DeviceOptions
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows, Pace
from hillinfer.devices.errors import DeviceError
from hillinfer.devices.launch_device import MEMORY_BYTES
from hillinfer.devices.loss_warning import warn_of_loss
from hillinfer.devices.query_blocks import unpack_query_blocks
from hillinfer.devices.scoring_device import DeviceSegment, ScoredTokens, StoredShadow
from hillinfer.hie.native_pieces import NativePieces, Piece
from hillinfer.hie.native_scorer import NativeScorer
from hillinfer.native.launch_thread import LaunchThread
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec


def open_core(
    spec: KernelSpec, scope: Scope, options: DeviceOptions, recorder: Recorder = SILENT
) -> DeviceScorer:
    """Return a scorer whose device is one more thread of this process.

    Raises
    ------
    NativeError
        The native library is missing.
    """
    shadows = DeviceShadows(spec, CoreDevice(spec), options.beta, warn_of_loss, Pace.REAL)
    return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)


class CoreDevice:
    """A `ScoringDevice` that works in parallel to the host wherever there is a second core.

    It is given bytes in the launch format and answers with score arrays, as a card does, and its
    memory is as large as a SmartSSD's; but that memory is this machine's, which M0 does not count.

    Parameters
    ----------
    spec
        Fixes sizes.
    core
        Runs launches, and is closed with this; a thread of the native library where None.

    Raises
    ------
    NativeError
        The native library is missing.
    """

    def __init__(self, spec: KernelSpec, core: LaunchThread | None = None) -> None:
        self._spec = spec
        self.slots = MEMORY_BYTES // spec.segment_bytes
        # Memory that is never written to is never taken.
        memory = aligned_buffer(self.slots * spec.segment_bytes)[: self.slots * spec.segment_bytes]
        self._memory = memory.reshape(self.slots, spec.segment_beats, BEAT_BYTES)
        # Kept views, because an address that is known need not be asked for.
        self._views: dict[int, NDArray[np.uint8]] = {}
        self._pieces = {scope: NativePieces(spec, scope) for scope in Scope}
        self._core = LaunchThread() if core is None else core

    def has_room(self, slot: int) -> bool:
        """Say whether there is such a slot; see `ScoringDevice`."""
        return slot < self.slots

    def write(self, slot: int, first_beat: int, beats: Beats) -> None:
        """Put beats into a slot's shadow; see `ScoringDevice`."""
        self._wait()
        self._memory[slot, first_beat : first_beat + len(beats)] = beats

    def load(self, shadows: Sequence[StoredShadow]) -> None:
        """Fill slots from files; see `ScoringDevice`."""
        self._wait()
        size = self._spec.segment_bytes
        pages = aligned_buffer(round_up(size, PAGE_BYTES))
        for one in shadows:
            try:
                came = os.preadv(one.file, [pages.data], one.offset)
            except OSError as error:
                raise DeviceError(f"the file of shadows cannot be read: {error}") from error
            if came < size:
                raise DeviceError(f"the file of shadows ends before byte {one.offset + size}")
            self._memory[one.slot] = pages[:size].reshape(-1, BEAT_BYTES)

    def read(self, slot: int, into: Beats) -> None:
        """Read a slot's shadow; see `ScoringDevice`."""
        into[:] = self._memory[slot, : len(into)]

    def score(
        self, scope: Scope, queries: Beats, segments: Sequence[DeviceSegment]
    ) -> Iterator[ScoredTokens]:
        """Score segments on the other core, beside what the host does; see `ScoringDevice`."""
        self._wait()
        given = unpack_query_blocks(self._spec, queries, len(segments))
        pieces = [
            Piece(number, self._view(one.slot), 0, one.tokens, one.base_position)
            for number, one in enumerate(segments)
        ]
        waiting = self._pieces[scope].begin(given, pieces, self._core)
        return (ScoredTokens(index, 0, tuples) for index, tuples in enumerate(_read(waiting)))

    def close(self) -> None:
        """Let the core go; memory goes with the object."""
        self._core.close()

    def _view(self, slot: int) -> NDArray[np.uint8]:
        if slot not in self._views:
            self._views[slot] = self._memory[slot]
        return self._views[slot]

    def _wait(self) -> None:
        """Wait for a launch that nobody reads any more: its shadows must not change under it."""
        # Whoever wants its tuples is told what became of it.
        with suppress(MemoryError):
            self._core.wait()


def _read(
    waiting: Callable[[], list[NDArray[np.uint32]]],
) -> Iterator[NDArray[np.uint32]]:
    """Wait where the first tuples are asked for."""
    yield from waiting()
