# SPDX-License-Identifier: Apache-2.0
"""The C++ harness around a Verilated kernel, as Python sees it (`hw/testbench/harness.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import POINTER, Structure, byref, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from hillinfer_hw.memory_model import MemoryModel
from hillinfer_model.beats import Beats

PORTS = 3
VIOLATIONS = (
    "a valid or its payload changed before ready",
    "a burst crosses 4 KiB",
    "size, burst type, strobes or alignment",
    "WLAST at the wrong beat",
    "a burst of more than 64 beats",
    "a channel that must be still",
    "the register map",
    "a burst open at ap_done",
    "a read beat the kernel was not ready for",
)
ENDINGS = ("timeout", "done", "reset")


class _Buffer(Structure):
    _fields_ = (
        ("address", c_uint64),
        ("data", c_void_p),
        ("bytes", c_uint64),
        ("writable", c_uint64),
    )


class _Memory(Structure):
    _fields_ = (
        ("read_min", c_uint32),
        ("read_max", c_uint32),
        ("write_min", c_uint32),
        ("write_max", c_uint32),
        ("shared_bus", c_uint32),
        ("refresh_period", c_uint32),
        ("refresh_cycles", c_uint32),
        ("outstanding", c_uint32),
        ("stall_percent", c_uint32 * 5),
        ("commit_at_response", c_uint32),
        ("seed", c_uint64),
        ("read_error", c_int64 * PORTS),
        ("write_error", c_int64),
    )


class _Snapshot(Structure):
    _fields_ = (
        ("status_address", c_uint64),
        ("status_beats", c_uint64),
        ("output_address", c_uint64),
        ("expected", c_void_p),
        ("segments", c_void_p),
        ("is_shadow", c_uint64),
        ("arrays", c_uint64),
        ("group_beats", c_uint64),
        ("complete_beats", c_void_p),
    )


class _Launch(Structure):
    _fields_ = (
        ("buffers", POINTER(_Buffer)),
        ("buffer_count", c_uint64),
        ("registers", POINTER(c_uint32)),
        ("register_count", c_uint64),
        ("memory", _Memory),
        ("snapshot", _Snapshot),
        ("max_cycles", c_uint64),
        ("reset_at", c_uint64),
    )


class _Outcome(Structure):
    _fields_ = (
        ("cycles", c_uint64),
        ("read_beats", c_uint64 * PORTS),
        ("read_bursts", c_uint64 * PORTS),
        ("write_beats", c_uint64),
        ("write_bursts", c_uint64),
        ("refresh", c_uint64),
        ("status_writes", c_uint64),
        ("stray_reads", c_uint64),
        ("stray_writes", c_uint64),
        ("snapshot_errors", c_uint64),
        ("violations", c_uint64),
        ("ended", c_uint64),
    )


@dataclass(frozen=True)
class Region:
    """A buffer in the kernel's address space.

    Parameters
    ----------
    address
        A multiple of 64.
    content
        uint8 of shape (beats, 64); the simulation writes into it.
    writable
        Whether the kernel may write there.
    """

    address: int
    content: Beats
    writable: bool


@dataclass(frozen=True)
class SnapshotCheck:
    """What must be in memory whenever a status beat gets there.

    Parameters
    ----------
    status, output
        Names of the regions.
    expected
        Content of the output region at the end of the launch; None to count status beats only.
    segments
        Descriptors.
    arrays
        Score arrays per segment.
    group_beats
        Beats of a group where the output is a shadow, else 0.
    complete_beats
        Beats of each segment's whole shadow; empty where the output is none.
    """

    status: str
    output: str
    expected: Beats | None
    segments: Beats
    arrays: int
    group_beats: int
    complete_beats: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a simulated launch did; see `hw/testbench/harness.h`.

    `cycles` runs from the write of ap_start to ap_done. `violations` are words, empty where every
    rule of the bus and of the register map was kept.
    """

    cycles: int
    read_beats: tuple[int, ...]
    read_bursts: tuple[int, ...]
    write_beats: int
    write_bursts: int
    refresh: int
    status_writes: int
    stray_reads: int
    stray_writes: int
    snapshot_errors: int
    violations: tuple[str, ...]
    ended: str


class Session:
    """One simulated kernel, from power-up on; launches run one after the other.

    Parameters
    ----------
    library
        Shared object made by `hillinfer_hw.verilate`.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.session_new.restype = c_void_p
        self._library.session_free.argtypes = (c_void_p,)
        self._library.session_run.argtypes = (c_void_p, POINTER(_Launch), POINTER(_Outcome))
        self._session: int | None = self._library.session_new()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the simulation."""
        if self._session is not None:
            self._library.session_free(self._session)
            self._session = None

    def run(
        self,
        regions: Mapping[str, Region],
        registers: Iterable[tuple[int, int]],
        memory: MemoryModel,
        snapshot: SnapshotCheck,
        max_cycles: int,
        reset_at: int = 0,
    ) -> Outcome:
        """Run one launch; the regions then hold what the kernel left.

        Parameters
        ----------
        regions
            All that the kernel may touch.
        registers
            Offsets and values, 32 bit.
        memory
            How memory behaves.
        snapshot
            What is checked at every status beat.
        max_cycles
            After that many the launch counts as hung.
        reset_at
            Cycle of the launch in which reset falls; 0 for none.

        Raises
        ------
        ValueError
            Where a region is no contiguous block of beats, or the session is closed.
        """
        if self._session is None:
            raise ValueError("the session is closed")
        for name, region in regions.items():
            if region.content.dtype != np.uint8 or not region.content.flags.c_contiguous:
                raise ValueError(f"region {name} is no contiguous block of bytes")
        buffers = (_Buffer * len(regions))(
            *(
                _Buffer(r.address, r.content.ctypes.data, r.content.nbytes, r.writable)
                for r in regions.values()
            )
        )
        flat = [number for pair in registers for number in pair]
        words = (c_uint32 * len(flat))(*flat)
        # Both must live until the launch is over.
        expected = None if snapshot.expected is None else np.ascontiguousarray(snapshot.expected)
        segments = np.ascontiguousarray(snapshot.segments)
        complete = np.array(snapshot.complete_beats, dtype=np.uint64)
        launch = _Launch(
            buffers,
            len(regions),
            words,
            len(flat) // 2,
            _memory(memory),
            _Snapshot(
                regions[snapshot.status].address,
                regions[snapshot.status].content.nbytes // 64,
                regions[snapshot.output].address,
                None if expected is None else expected.ctypes.data,
                segments.ctypes.data,
                snapshot.group_beats != 0,
                snapshot.arrays,
                snapshot.group_beats,
                complete.ctypes.data,
            ),
            max_cycles,
            reset_at,
        )
        outcome = _Outcome()
        self._library.session_run(self._session, byref(launch), byref(outcome))
        return _read(outcome)


def _memory(model: MemoryModel) -> _Memory:
    return _Memory(
        *model.read_latency,
        *model.write_latency,
        model.shared_bus,
        *model.refresh,
        model.outstanding,
        (c_uint32 * 5)(*model.stall_percent),
        model.commit_at_response,
        model.seed,
        (c_int64 * PORTS)(*model.read_error),
        model.write_error,
    )


def _read(outcome: _Outcome) -> Outcome:
    named = tuple(text for bit, text in enumerate(VIOLATIONS) if outcome.violations >> bit & 1)
    return Outcome(
        outcome.cycles,
        tuple(outcome.read_beats),
        tuple(outcome.read_bursts),
        outcome.write_beats,
        outcome.write_bursts,
        outcome.refresh,
        outcome.status_writes,
        outcome.stray_reads,
        outcome.stray_writes,
        outcome.snapshot_errors,
        named,
        ENDINGS[outcome.ended],
    )
