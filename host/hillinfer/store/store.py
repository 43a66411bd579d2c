# SPDX-License-Identifier: Apache-2.0
"""A store of KV on drives: what requests, processes and restarts have read, found by its tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from weakref import WeakSet

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import ScratchPath
from hillinfer.errors import HillInferError, reason_of, way_out
from hillinfer.secrecy.key_sources import KeySource, WithoutKey
from hillinfer.secrecy.library import SecrecyError
from hillinfer.secrecy.pages import PlainPages
from hillinfer.statistics import StoreCounts, StoreMeter, store_metrics
from hillinfer.store.database import Chunk, opened_database
from hillinfer.store.eviction import DEFAULT_EVICTION, Turns, make_eviction_policy
from hillinfer.store.extent import Sheet, SheetReader
from hillinfer.store.index import Index
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    TOKEN_TYPE,
    Expected,
    ExtentShape,
    Namespace,
    group_keys,
    root_key,
    token_words,
)
from hillinfer.store.maintenance import Parts, Verified, chunks_of, rebuild, verify
from hillinfer.store.pool_files import ABOUT, PoolFile, StoreError, StorePlaces, place_of
from hillinfer.store.prefix import StoredChunk, StoredPrefix, WrongBytesError
from hillinfer.store.retirement import Retirement, sealed_by
from hillinfer.store.room import ExtentRoom, Intake
from hillinfer.store.writer import PrefixWriter
from hillinfer.store_rules import StoreRules
from hillinfer.system.kept_memory import BLOCK_BYTES, KeptMemory
from hillinfer_model.kernel_spec import GROUP_TOKENS

_GROUP_BYTES = GROUP_TOKENS * TOKEN_TYPE.itemsize
# Kept of what streams read into: that of a few.
_MOST_READING_BYTES = 4 * BLOCK_BYTES


class Store:
    """Stored prefixes of prompts, on one drive or several, shared with other processes.

    Any thread may use it, and any number of processes may have it open. A failure is a miss and
    never an error of whoever asks; `raising` makes it one.

    Parameters
    ----------
    directory
        Made by `create`.
    eviction
        Name of the policy that ranks what is to go where room is short; that of the store's rules
        where None.
    raising
        Called with what would be a miss, and may raise it; nothing where None.
    calls
        How the drives are reached; the operating system itself where None.
    clock
        Returns the time in seconds.
    key
        What an encrypted store's key comes from, or that there is none: then the index alone is
        looked at. None for a store that is not encrypted.

    Raises
    ------
    StoreError
        Where it is no store, or cannot be used.
    SecrecyError
        Where it is encrypted and the key is missing or another one.

    Attributes
    ----------
    places
        Where its parts lie.
    keys, rules
        What its chunks are sealed by, and what it keeps to.
    database, index, files, room
        Its parts.
    """

    def __init__(
        self,
        directory: Path | str,
        eviction: str | None = None,
        raising: Callable[[Exception], None] | None = None,
        calls: DriveCalls | None = None,
        clock: Callable[[], float] = time.time,
        key: KeySource | WithoutKey | None = None,
    ) -> None:
        self._raising = raising
        self._meter = StoreMeter()
        # Some may still be read in the background when the store is closed.
        self._prefixes: WeakSet[StoredPrefix] = WeakSet()
        self._turns = Turns()
        self._reading = KeptMemory(_MOST_READING_BYTES)
        self.places = StorePlaces.read(Path(directory))
        self.keys = self.places.unlocked(key, calls)
        self.rules = StoreRules.read(self.places.directory)
        name = eviction or self.rules.eviction or DEFAULT_EVICTION
        policy = make_eviction_policy(name, self._turns)
        with ExitStack() as opened:
            pool, flags = self.places.pool, self.places.open_flags
            self.files: Sequence[PoolFile] = [
                opened.enter_context(closing(PoolFile(path, pool, drive, size, flags, calls)))
                for drive, (path, size) in enumerate(self.places.files)
            ]
            files, units = self.files, [file.units for file in self.files]
            database = opened_database(
                self.places,
                units,
                lambda new: rebuild(new, files, pool, self.keys, policy, clock()),
            )
            opened.callback(database.close)
            self.database, self.index = database, Index(database)
            learned = policy, self._turns
            self._intake = Intake(database, files, self.rules, *learned, self._meter, clock)
            try:
                self._token = ScratchPath.make_file(self.places.owners, calls or DriveCalls())
            except OSError as error:
                raise StoreError(
                    f"the store {directory} takes no files: {reason_of(error)}; "
                    f"{way_out(error, 'choose another --store')}"
                ) from error
            opened.callback(self._token.remove)
            self._owner = self.index.add_owner(self._token.path.name, os.getpid(), clock())
            opened.callback(self._leave)
            self._retirement = Retirement(database)
            parts = self.places, self.index, self._retirement, files
            self.room = ExtentRoom(*parts, self._owner, policy, self._intake, clock)
            self._sheets = SheetReader(self.files, pool, self.keys, self.index.shape)
            self.room.collect()
            self._opened = opened.pop_all()

    @staticmethod
    def exists(directory: Path | str) -> bool:
        """Return whether a directory holds a store, usable or not."""
        try:
            return (Path(directory) / ABOUT).exists()
        except OSError:
            # A name that is too long, for one.
            return False

    @staticmethod
    def create(
        directory: Path | str,
        size: int,
        drives: Sequence[Path | str] = (),
        key: KeySource | None = None,
    ) -> None:
        """Make an empty store.

        Parameters
        ----------
        directory
            Where it lies; made where it is missing, owner-only.
        size
            Bytes that it may take in all, index included.
        drives
            Directories on other drives; it is divided evenly among all of them.
        key
            What an encrypted store's key comes from, made where it is missing and can be; None for
            a store that is not encrypted.

        Raises
        ------
        StoreError
            Where there is a store already, or none can be.
        SecrecyError
            Where there is no key.
        """
        StorePlaces.create(Path(directory), size, [Path(drive) for drive in drives], key)

    @property
    def counts(self) -> StoreCounts:
        """What it did for this process since it was opened."""
        return self._meter.counts

    def statistics(self) -> dict[str, int | float]:
        """Return what the store holds now, by name."""
        return self.room.statistics()

    def metrics(self) -> dict[str, float]:
        """Return counts and what the store holds now, by the names that a server gives out."""
        put_off = sum(file.turns.counts()["deferred_writes"] for file in self.files)
        return store_metrics(self.counts, {**self.statistics(), "deferred_writes": put_off})

    def seconds_per_group(self, namespace: Namespace) -> float:
        """Return what computing a group took lately, by what is stored; 0 where nothing is."""
        return self._intake.seconds_per_group(namespace.digest)

    def verify(
        self, parts: Parts, on_progress: Callable[[int, int], None] = lambda done, of: None
    ) -> Verified:
        """Compare every chunk with its checksums; what is wrong is found by nobody any more.

        Parameters
        ----------
        parts
            What is looked at.
        on_progress
            Called with how many chunks are done, and of how many.
        """
        return verify(
            self.database,
            self.files,
            self.places.pool,
            self.keys,
            self._retirement.quarantine,
            parts,
            on_progress,
        )

    def remove(self, name: str) -> int:
        """Remove a stored prefix, as far as nothing else goes on from it; return how many chunks.

        Parameters
        ----------
        name
            First digits of its key, as `chains` gives them.

        Raises
        ------
        StoreError
            Where nothing, or more than one, is called so, or it is in use.
        """
        removed = 0
        for number in chunks_of(self.database, name):
            if not self._retirement.remove(number):
                break
            removed += 1
        if not removed:
            raise StoreError(f"'{name}' is in use: end what uses it, or wait")
        self.room.clear_tombed()
        return removed

    def forget(self, salt: bytes) -> int:
        """Throw away the key of all that a salt has stored; return how many chunks that were.

        Raises
        ------
        StoreError
            Where another process has the store open, and so may have the key.
        SecrecyError
            Where the store is not encrypted, or its keys cannot be changed.
        """
        self.room.check_alone()
        number = self.keys.forget(salt)
        self._sheets.forget()
        if number is None:
            return 0
        pool = self.places.pool
        return self.room.drop(sealed_by(self.database, self.files, pool, number))

    def find(
        self,
        namespace: Namespace,
        ids: Sequence[int],
        salt: bytes = b"",
        others: Sequence[Namespace] = (),
    ) -> StoredPrefix | None:
        """Return the longest stored prefix of a prompt, whose chunks stay until it is closed.

        None where nothing is stored of it, or nothing that can be used.

        Parameters
        ----------
        namespace
            What its KV would be made by.
        ids
            Token numbers of the prompt.
        salt
            Of a tenant; what others have stored is not found.
        others
            Of other makers whose rows are accepted where they have more of the prompt.
        """
        prefix = None
        try:
            self.database.check_process()
            prefix = self._find(namespace, ids, salt)
            for other in others:
                prefix = _longer(prefix, self._find(other, ids, salt))
        except (OSError, StoreError, SecrecyError) as error:
            self._failed(error)
        found = 0 if prefix is None else prefix.tokens
        self._meter.add(
            lookups=1,
            hit_tokens=found,
            miss_tokens=len(ids) - found,
            saved_seconds=0.0 if prefix is None else prefix.cost,
        )
        return prefix

    def writer(
        self,
        namespace: Namespace,
        ids: Sequence[int],
        found: StoredPrefix | None = None,
        salt: bytes = b"",
        turn: int = 0,
        leased: Callable[[Sequence[StoredChunk]], None] | None = None,
        extra_bytes: int = 0,
    ) -> PrefixWriter | None:
        """Return what stores the rest of a prompt behind its stored prefix.

        None where nothing is left to store, it is not admitted, or another process is about to
        store the same.

        Parameters
        ----------
        namespace, ids, salt
            As in `find`.
        found
            What `find` returned, open until the writer is closed.
        turn
            Which turn of a conversation this is, 1 the first; 0 where nobody knows.
        leased
            Told of chunks that are published, which are leased for it then until `release`; None
            where nobody reads them on.
        extra_bytes
            Room that new extents get behind their planes; none where chunks are sealed.
        """
        try:
            self.database.check_process()
            sealing = self.keys.made(salt)
            root = root_key(namespace.digest, salt, sealing.hash_key)
            keys = group_keys(root, ids, sealing.hash_key)
            turn = turn or self._turns.of(keys[CHUNK_GROUPS - 1 :: CHUNK_GROUPS])
            stored = 0 if found is None else found.tokens // GROUP_TOKENS
            extra_bytes = 0 if self.keys.tag_bytes else extra_bytes
            shape = ExtentShape.of(namespace, self.keys.tag_bytes, extra_bytes)
            extent_bytes = shape.byte_count
            wanted = self._intake.admitted(namespace.digest, extent_bytes, keys, stored, turn)
            if wanted < len(keys):
                keys, ids = keys[:wanted], ids[: wanted * GROUP_TOKENS]
            if wanted <= stored:
                return None
            stop = (stored // CHUNK_GROUPS + 1) * CHUNK_GROUPS
            if self.index.is_being_written(keys[min(stop, len(keys)) - 1]):
                return None
        except (OSError, StoreError, SecrecyError) as error:
            self._failed(error)
            return None

        def published(chunks: Sequence[StoredChunk]) -> None:
            if leased is not None:
                self.lease([chunk.record.number for chunk in chunks])
                leased(chunks)

        parts = self.room, self.files, self.places.pool
        return PrefixWriter(
            *parts, namespace, root, ids, found, self._failed, turn, published, sealing,
            extra_bytes,
        )  # fmt: skip

    def lease(self, chunks: list[int]) -> None:
        """Lease chunks once more that this process leases or is filling; StoreError on failure."""
        self.index.lease(self._owner, chunks)

    def release(self, chunks: list[int]) -> None:
        """End one lease of each of some chunks, by their numbers; in a forked child, none."""
        if self.database.is_inherited:
            return
        try:
            self.index.release(self._owner, chunks)
            self.room.write_due()
        except StoreError as error:
            self._failed(error)

    def blame(self, number: int, error: Exception) -> None:
        """Let nobody find a chunk any more that could not be read, or is not as it was written."""
        self._meter.add(quarantined_chunks=1)
        try:
            self._retirement.quarantine(number)
        except StoreError as failure:
            self._failed(failure)
        self._failed(error)

    def close(self) -> None:
        """Give leases and files back, a forked child its descriptors; harmless when done twice."""
        if self.database.is_inherited:
            self._opened.pop_all()
            self._token.release()
            for file in self.files:
                file.close()
            return
        for prefix in list(self._prefixes):
            prefix.stop()
        self._opened.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ----------------------------------------------------------------------------

    def _find(self, namespace: Namespace, ids: Sequence[int], salt: bytes) -> StoredPrefix | None:
        words = token_words(ids)
        sealing = self.keys.found(salt)
        if sealing is None:
            return None
        data, digest = words.tobytes(), namespace.digest
        root = root_key(digest, salt, sealing.hash_key)
        keys = group_keys(root, words, sealing.hash_key)
        leased = self.index.lookup(keys, self._owner)
        expected = []
        for position, (_, groups) in enumerate(leased):
            first = position * CHUNK_GROUPS
            own_keys = keys[first : first + groups]
            own_ids = data[first * _GROUP_BYTES : (first + groups) * _GROUP_BYTES]
            expected.append(Expected(digest, keys[first - 1] if first else root, own_keys, own_ids))
        kept: list[StoredChunk] = []
        sealed, plain = bool(self.keys.tag_bytes), PlainPages()
        try:
            sheets = self._sheets.of([chunk for chunk, _ in leased], expected)
            for (chunk, groups), wanted, found in zip(leased, expected, sheets, strict=True):
                newest = _newest(found, wanted)
                if newest is None:
                    self._quarantine(chunk, "what its drive says of it")
                    break
                slot, sheet, covered = newest
                pages = sheet.pages(place_of(chunk.span, self.places.pool)) if sealed else plain
                kept.append(StoredChunk(chunk, sheet, slot, covered, pages))
                if covered < groups:
                    break
        finally:
            # What is not kept is released whatever happened.
            gone = [chunk.number for chunk, _ in leased[len(kept) :]]
            if gone:
                self.index.release(self._owner, gone)
        if not kept:
            return None
        self.room.touch([chunk.record for chunk in kept])
        told = self.release, self._wrong, self._meter.add
        prefix = StoredPrefix(kept, self.files, *told, self._reading)
        self._prefixes.add(prefix)
        return prefix

    def _quarantine(self, chunk: Chunk, what: str) -> None:
        self._meter.add(quarantined_chunks=1)
        self._retirement.quarantine(chunk.number)
        self._failed(StoreError(f"{what} is not what was written to chunk {chunk.number}"))

    def _wrong(self, error: WrongBytesError | OSError) -> None:
        if isinstance(error, OSError):
            self._failed(error)
        else:
            self.blame(error.chunk.record.number, error)

    def _failed(self, error: Exception) -> None:
        self._meter.note_failure(error)
        if self._raising is not None:
            self._raising(error)

    def _leave(self) -> None:
        try:
            self.room.write_touched()
            # Room that is being cleared is an owner's: it is known until that is done.
            self.index.end_owner(self._owner)
            self.room.clear_tombed()
            self.index.remove_owner(self._owner)
            self._intake.leave()
        except (OSError, HillInferError) as error:
            # Whoever opens the store next collects what this process leaves.
            self._meter.note_failure(error)


def _longer(own: StoredPrefix | None, other: StoredPrefix | None) -> StoredPrefix | None:
    """Return the prefix that has more tokens, the first where both have as many; close the other.

    Rows of two makers are never joined.
    """
    if own is None or other is None:
        return own or other
    kept, left = (other, own) if other.tokens > own.tokens else (own, other)
    left.close()
    return kept


def _newest(sheets: Sequence[tuple[int, Sheet]], wanted: Expected) -> tuple[int, Sheet, int] | None:
    """Return the newer one of a chunk's sheets that are of a prompt.

    Its slot comes before it, and how many groups of the prompt it covers behind it; None where none
    is of the prompt.
    """
    best = None
    for slot, sheet in sheets:
        covered = sheet.covered_of(wanted)
        if covered and (best is None or sheet.header.generation > best[1].header.generation):
            best = slot, sheet, covered
    return best
