# SPDX-License-Identifier: Apache-2.0
"""The files of a store: what it says of itself, and a preallocated file per drive."""

from __future__ import annotations

import errno
import json
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.directories import alone_in, filesystem_of, is_network, put_in_place
from hillinfer.drive.files import PAGE_BYTES, IOMode, aligned_buffer, round_up, sweep
from hillinfer.drive.read_turns import QUANTUM_BYTES, Apart, Patience, ReadTurns
from hillinfer.errors import HillInferError, reason_of, way_out
from hillinfer.native.library import native_library
from hillinfer.native.structures import ReadWay
from hillinfer.secrecy.key_sources import KeySource, WithoutKey
from hillinfer.secrecy.key_table import KeyTable
from hillinfer.secrecy.library import CIPHER, TAG_BYTES
from hillinfer.secrecy.pages import Place
from hillinfer.secrecy.store_keys import StoreKeys, opened_keys
from hillinfer.store.keys import STORE_VERSION, UNIT_BYTES
from hillinfer.system.files import read_plain
from hillinfer.values import format_bytes

# A read of this size is as fast as any longer one.
READ_BYTES = 1 << 20
# Streams of pieces that read one drive at once.
READERS = 4
# Storing waits for reads this long: nobody else waits for it, but whoever stores does.
_PATIENCE = Patience(slack_seconds=0.05, spill_seconds=0.02)
# Files grow by this part of what they may become, so that a full drive is met early and seldom.
_GROWTH_PART = 64
_MAGIC = b"HillPool"
_FIRST_PAGE = struct.Struct("<8sII16s")


class StoreError(HillInferError):
    """A store cannot be used, or something in it is not as it was written."""


class StoreExistsError(StoreError):
    """There is a store already where one was to be made."""


class StoreFailedError(StoreError):
    """A store failed where that is not to be a miss."""


def insist(error: Exception) -> None:
    """Raise what would be a miss, for tests; to be given to `Store` as `raising`."""
    raise StoreFailedError(f"the store failed: {error}") from error


# --- What a store says of itself ---

# What makes a directory a store.
ABOUT = "store.json"
_MOST_ABOUT_BYTES = 1 << 20
_OWNERS = "owners"
_KEYS = "keys.json"
# An encrypted store's, so that a HillInfer that knows none does not take its chunks for damaged.
SEALED_VERSION = 2
# What the index may take of a store's size: measured, it takes less than 3 kB of a chunk, and
# SQLite's log up to 4 MiB beside it.
_INDEX_LEAST, _INDEX_PART = 8 << 20, 1024
LEAST_BYTES = 64 << 20


@dataclass(frozen=True)
class StorePlaces:
    """Where the parts of a store lie.

    Parameters
    ----------
    directory
        The store's.
    pool
        Its identity, 16 random bytes that every file of it has.
    size
        Bytes that it may take in all.
    files
        The pool file of each drive, and what it may grow to.
    cipher
        What it is encrypted by, empty where it is not.
    """

    directory: Path
    pool: bytes
    size: int
    files: tuple[tuple[Path, int], ...]
    cipher: str = ""

    @property
    def tag_bytes(self) -> int:
        """Bytes that each page has in its extent's tag plane."""
        return TAG_BYTES if self.cipher else 0

    @property
    def keys(self) -> Path:
        """Where the keys of an encrypted store are."""
        return self.directory / _KEYS

    @property
    def index(self) -> Path:
        """Where the index is."""
        return self.directory / "index.sqlite"

    @property
    def open_flags(self) -> int:
        """How its drives' files are opened: made where it never held anything, else there."""
        # One that is gone lies on a drive that is not mounted, and another one would fill the
        # drive of the mount point.
        try:
            grown = (path.exists() and path.stat().st_size > UNIT_BYTES for path, _ in self.files)
            is_used = self.index.exists() or any(grown)
        except OSError:
            is_used = True
        return os.O_RDWR | os.O_NOFOLLOW | (0 if is_used else os.O_CREAT)

    @property
    def owners(self) -> Path:
        """Where processes show that they live."""
        return self.directory / _OWNERS

    @property
    def is_shared(self) -> bool:
        """Whether a process has the store open, whose marks are not cleared away."""
        sweep(self.owners)
        return any(self.owners.iterdir())

    def unlocked(
        self, key: KeySource | WithoutKey | None, calls: DriveCalls | None = None
    ) -> StoreKeys:
        """Return the keys of the store; parameters and errors as those of `Store`."""
        return opened_keys(self.keys, self.cipher, self.pool, key, calls)

    @classmethod
    def read(cls, directory: Path) -> StorePlaces:
        """Return where the parts of an existing store lie.

        Raises
        ------
        StoreError
            Where there is none, or one that this version cannot use.
        """
        try:
            about = json.loads(read_plain(directory / ABOUT, _MOST_ABOUT_BYTES))
            version, pool = about["version"], bytes.fromhex(about["pool"])
            size = int(about["size"])
            files = tuple(
                ((Path(place) if place else directory) / f"pool-{number}.kv", int(own))
                for number, (place, own) in enumerate(about["drives"])
            )
            cipher = about.get("cipher", "")
        except FileNotFoundError as error:
            raise StoreError(
                f"{directory} holds no store: make one with hillinfer store init {directory}"
            ) from error
        except OSError as error:
            raise StoreError(
                f"the store {directory} cannot be read: {reason_of(error)}; "
                f"{way_out(error, 'choose another --store')}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{directory / ABOUT} does not say what a store says: make the store anew"
            ) from error
        wanted = SEALED_VERSION if cipher else STORE_VERSION
        if version != wanted or cipher not in ("", CIPHER) or len(pool) != 16 or not files:
            raise StoreError(
                f"the store {directory} is of version {version}, not {wanted}: use the "
                "HillInfer that made it, or make the store anew"
            )
        return cls(directory, pool, size, files, cipher)

    @classmethod
    def create(
        cls, directory: Path, size: int, drives: Sequence[Path] = (), key: KeySource | None = None
    ) -> StorePlaces:
        """Make an empty store; parameters and errors as those of `Store.create`."""
        calls = DriveCalls()
        if size < LEAST_BYTES:
            raise StoreError(
                f"a store of {format_bytes(size)} is too small: give --store-size "
                f"{format_bytes(LEAST_BYTES)} or more"
            )
        places = [directory, *drives]
        try:
            for place in places:
                if not place.exists():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    # Another process may be as quick.
                    with suppress(FileExistsError):
                        calls.mkdir(place)
                kind = filesystem_of(place)
                if is_network(kind):
                    raise StoreError(
                        f"{place} is on {kind}, a network, where processes cannot share a store: "
                        "choose a local drive with --store"
                    )
            left = size - max(_INDEX_LEAST, size // _INDEX_PART)
            own = left // len(places) // UNIT_BYTES * UNIT_BYTES
            pool = secrets.token_bytes(16)
            about: dict[str, object] = {
                "version": STORE_VERSION,
                "pool": pool.hex(),
                "size": size,
                "drives": [["", own], *([str(place.resolve()), own] for place in drives)],
            }
            # One process makes all of it: files of two would be of two stores.
            with alone_in(directory, calls):
                if (directory / ABOUT).exists():
                    raise StoreExistsError(
                        f"{directory} holds a store already: use it, or choose another"
                    )
                if not (directory / _OWNERS).exists():
                    calls.mkdir(directory / _OWNERS)
                if key is not None:
                    # Before there is a store, so that there is none that nobody can read.
                    KeyTable.create(directory / _KEYS, pool, key, calls)
                    about |= {"version": SEALED_VERSION, "cipher": CIPHER}
                put_in_place(directory / ABOUT, json.dumps(about, indent=1).encode(), calls)
        except OSError as error:
            raise StoreError(
                f"no store can be made in {directory}: {reason_of(error)}; "
                f"{way_out(error, 'choose another --store')}"
            ) from error
        return cls.read(directory)


# --- Files of drives ---


# A tuple, because a lookup makes one for every chunk.
class Span(NamedTuple):
    """A run of a pool file.

    Parameters
    ----------
    drive
        Number of the file.
    unit, units
        Where it begins and how long it is, in units of 128 KiB.
    """

    drive: int
    unit: int
    units: int

    @property
    def offset(self) -> int:
        """Where it begins, in bytes."""
        return self.unit * UNIT_BYTES

    @property
    def byte_count(self) -> int:
        """Its bytes."""
        return self.units * UNIT_BYTES


def place_of(span: Span, pool: bytes) -> Place:
    """Return where an extent of a store lies, as what seals its pages knows it."""
    return Place(pool, span.drive, span.unit)


class PoolFile:
    """One file of a store on one drive; any number of threads and processes may use it at once.

    Parameters
    ----------
    path
        An existing file, or one to be made.
    pool
        Identity of the store, 16 bytes.
    drive
        Its number in the store.
    most_bytes
        What it may grow to.
    flags
        As `StorePlaces.open_flags` says.
    calls
        How the drive is reached; the operating system itself where None.

    Raises
    ------
    StoreError
        Where it cannot be opened, or is a file of another store.

    Attributes
    ----------
    turns
        Who has the drive: streams by their deadlines before what is written in slack.
    written_bytes
        What was written to it since it was opened, by whatever it is worn.
    read_unit
        What reads of single rows are multiples of, in bytes: mostly a sector, or a page.
    """

    def __init__(
        self,
        path: Path,
        pool: bytes,
        drive: int,
        most_bytes: int,
        flags: int,
        calls: DriveCalls | None = None,
    ) -> None:
        self.path = path
        self.turns = ReadTurns(mixing=Apart(READERS), patience=_PATIENCE)
        self._calls = calls or DriveCalls()
        self._most_bytes = most_bytes // UNIT_BYTES * UNIT_BYTES
        self._counting = threading.Lock()
        self.written_bytes = 0
        try:
            self._descriptor, self.io_mode = self._opened(flags)
            direct = self.io_mode is IOMode.DIRECT
            self.read_unit = self._calls.read_unit(self._descriptor) if direct else PAGE_BYTES
            try:
                self._check(pool, drive)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise StoreError(
                f"the store's file {path} cannot be used: {reason_of(error)}; "
                f"{way_out(error, 'put the drive back that it lies on, or make the store anew')}"
            ) from error

    @property
    def descriptor(self) -> int:
        """Number of the open file."""
        return self._descriptor

    @property
    def units(self) -> int:
        """Units that may be used, the first one aside, which says whose file it is."""
        return self._most_bytes // UNIT_BYTES - 1

    @property
    def byte_count(self) -> int:
        """Bytes that it takes on the drive now."""
        return self._calls.size(self._descriptor)

    @property
    def growth_bytes(self) -> int:
        """What its drive has for it: without the rest an index cannot even be looked into."""
        return self._calls.free_bytes(self._descriptor) - _INDEX_LEAST

    def ensure(self, span: Span) -> None:
        """Have room on the drive for a span; OSError where it has none but what the index needs."""
        stop = span.offset + span.byte_count
        size = self.byte_count
        if stop > size:
            step = max(self._most_bytes // _GROWTH_PART, span.byte_count)
            grown = min(max(round_up(stop, step), stop), self._most_bytes)
            left = self.growth_bytes
            if left < stop - size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            grown = grown if grown - size <= left else stop
            try:
                self._calls.allocate(self._descriptor, size, grown - size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or grown == stop:
                    raise
                # The step is a convenience; what is wanted now may still fit.
                self._calls.allocate(self._descriptor, size, stop - size)

    def write(self, data: NDArray[np.uint8], offset: int) -> None:
        """Write whole pages from page-aligned memory; OSError where that fails.

        Parameters
        ----------
        data
            uint8, contiguous, page-aligned.
        offset
            A multiple of 4,096.
        """
        view, done = data.reshape(-1).data, 0
        while done < len(view):
            piece = view[done : done + QUANTUM_BYTES]
            with self.turns.writing(len(piece)):
                count = self._calls.pwrite(self._descriptor, piece, offset + done)
            done += self._progress(count, len(piece))
        self.wrote(len(view))

    def wrote(self, byte_count: int) -> None:
        """Count bytes that somebody wrote to it."""
        with self._counting:
            self.written_bytes += byte_count

    def read(self, into: NDArray[np.uint8], offset: int) -> None:
        """Fill page-aligned memory with whole pages; OSError where that fails."""
        view, done = into.reshape(-1).data, 0
        while done < len(view):
            done += self._progress(
                self._calls.preadv(self._descriptor, view[done:], offset + done), len(view) - done
            )

    def read_many(
        self,
        reads: Reads,
        into: NDArray[np.uint8],
        threads: int,
        call_bytes: int = 0,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        """Make many reads at once, so many in flight; OSError where one of them fails.

        Parameters
        ----------
        reads
            Which, and where in memory they go.
        into
            Page-aligned memory.
        threads
            How many are in flight.
        call_bytes
            As for `RowPiece`.
        rows
            int64 (reads, fields of `BlockRows`): what the threads that read place at once.
        """
        way = ReadWay(
            watch=self._calls.watch,
            descriptor=self._descriptor,
            threads=threads,
            joined_bytes=call_bytes,
        )
        if rows is None:
            results = self._calls.read_many(way, reads, into.ctypes.data)
        else:
            results = self._calls.read_to_blocks(way, reads, into.ctypes.data, rows)
        assert results is not None, "threads give all their reads back"
        for number, (came, wanted) in enumerate(
            zip(results.tolist(), reads.byte_counts.tolist(), strict=True)
        ):
            if came < 0:
                raise OSError(-came, os.strerror(-came), str(self.path))
            if came < wanted:
                start = int(reads.buffer_offsets[number])
                self.read(into[start : start + wanted], int(reads.file_offsets[number]))
                if rows is not None:
                    rows[number, 0] = into.ctypes.data + start
                    native_library().rows_to_blocks(rows[number])

    def settle(self) -> None:
        """Wait until everything written is on the drive."""
        self._calls.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):
                self._calls.close(descriptor)

    # --- inside ----------------------------------------------------------------------------

    def _opened(self, flags: int) -> tuple[int, IOMode]:
        try:
            return self._calls.open(self.path, flags | os.O_DIRECT), IOMode.DIRECT
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._calls.open(self.path, flags), IOMode.BUFFERED

    def _check(self, pool: bytes, drive: int) -> None:
        page = aligned_buffer(PAGE_BYTES)
        expected = _FIRST_PAGE.pack(_MAGIC, STORE_VERSION, drive, pool)
        if self.byte_count == 0:
            self._calls.allocate(self._descriptor, 0, UNIT_BYTES)
        self.read(page, 0)
        if self.byte_count == UNIT_BYTES and not page.any():
            # New, or made by another process just now: both write the same.
            page[: len(expected)] = np.frombuffer(expected, np.uint8)
            self.write(page, 0)
            self.settle()
        if page[: len(expected)].tobytes() != expected:
            raise StoreError(
                f"{self.path} is not file {drive} of this store: another store's file, or another "
                "drive, is in its place; put the right one back, or make the store anew"
            )

    def _progress(self, count: int, wanted: int) -> int:
        # Direct I/O may stop anywhere but must go on at a multiple of 4,096.
        whole = count if count == wanted else count // PAGE_BYTES * PAGE_BYTES
        if not whole:
            raise OSError(errno.EIO, "no progress: the file is shorter than it was", str(self.path))
        return whole
