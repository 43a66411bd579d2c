# SPDX-License-Identifier: Apache-2.0
"""A store of KV on drives: what requests, processes and restarts have read, found by its tokens."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.leftovers import ScratchPath, sweep
from hillinfer.errors import HillInferError, reason_of, way_out
from hillinfer.store.database import Chunk, Database
from hillinfer.store.eviction import DEFAULT_EVICTION, Turns, make_eviction_policy
from hillinfer.store.extent import Expected
from hillinfer.store.index import Index
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    TOKEN_TYPE,
    Namespace,
    group_keys,
    root_key,
    token_words,
)
from hillinfer.store.maintenance import Parts, Verified, chunks_of, rebuild, verify
from hillinfer.store.pool_files import ABOUT, PoolFile, StoreError, StorePlaces
from hillinfer.store.prefix import SheetReader, StoredChunk, StoredPrefix, WrongBytesError
from hillinfer.store.retirement import Retirement
from hillinfer.store.room import ExtentRoom
from hillinfer.store.writer import PrefixWriter
from hillinfer_model.kernel_spec import GROUP_TOKENS

# By this name the index notes what was learned of conversations.
_TURNS = "turns"
_GROUP_BYTES = GROUP_TOKENS * TOKEN_TYPE.itemsize
_LOOK_SECONDS = 0.005


@dataclass
class StoreCounts:
    """What a store did for this process since it was opened.

    Parameters
    ----------
    lookups, hit_tokens, miss_tokens
        Prompts looked up, and how many of their tokens were found.
    evicted_chunks, quarantined_chunks
        Chunks that gave way, and those whose bytes were wrong.
    failures
        What went wrong and became a miss.
    saved_seconds
        What computing the rows that were found took when they were stored.
    last_failure
        What went wrong last.
    """

    lookups: int = 0
    hit_tokens: int = 0
    miss_tokens: int = 0
    evicted_chunks: int = 0
    quarantined_chunks: int = 0
    failures: int = 0
    saved_seconds: float = 0.0
    last_failure: str = ""


class Store:
    """Stored prefixes of prompts, on one drive or several, shared with other processes.

    Any thread may use it, and any number of processes may have it open. A failure is a miss and
    never an error of whoever asks; `raising` makes it one.

    Parameters
    ----------
    directory
        Made by `create`.
    eviction
        Name of the policy that ranks what is to go where room is short.
    raising
        Called with what would be a miss, and may raise it; nothing where None.
    calls
        How the drives are reached; the operating system itself where None.
    clock
        Returns the time in seconds.

    Raises
    ------
    StoreError
        Where it is no store, or cannot be used.

    Attributes
    ----------
    places
        Where its parts lie.
    database, index, files, room
        Its parts.
    """

    def __init__(
        self,
        directory: Path | str,
        eviction: str = DEFAULT_EVICTION,
        raising: Callable[[Exception], None] | None = None,
        calls: DriveCalls | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._raising = raising
        self._pid = os.getpid()
        self._counts = StoreCounts()
        self._turns = Turns()
        self.places = StorePlaces.read(Path(directory))
        with ExitStack() as opened:
            files = []
            for drive, (path, size) in enumerate(self.places.files):
                files.append(PoolFile(path, self.places.pool, drive, size, calls))
                opened.callback(files[-1].close)
            self.files: Sequence[PoolFile] = tuple(files)
            database = self._database(files, clock)
            opened.callback(database.close)
            self.database, self.index = database, Index(database)
            try:
                token = ScratchPath.make_file(self.places.owners, calls or DriveCalls())
            except OSError as error:
                raise StoreError(
                    f"the store {directory} takes no files: {reason_of(error)}; "
                    f"{way_out(error, 'choose another --store')}"
                ) from error
            opened.callback(token.remove)
            self._owner = self.index.add_owner(token.path.name, self._pid, clock())
            opened.callback(self._leave)
            self._retirement = Retirement(database)
            self._sheets = SheetReader(self.files, self.places.pool, self.index.shape)
            self._resume_turns()
            self.room = ExtentRoom(
                self.places,
                self.index,
                self._retirement,
                files,
                self._owner,
                make_eviction_policy(eviction, self._turns),
                clock,
            )
            self.room.collect()
            self._opened = opened.pop_all()

    @staticmethod
    def exists(directory: Path | str) -> bool:
        """Return whether a directory holds a store, usable or not."""
        return (Path(directory) / ABOUT).exists()

    @staticmethod
    def create(directory: Path | str, size: int, drives: Sequence[Path | str] = ()) -> None:
        """Make an empty store.

        Parameters
        ----------
        directory
            Where it lies; made where it is missing, owner-only.
        size
            Bytes that it may take in all, index included.
        drives
            Directories on other drives; it is divided evenly among all of them.

        Raises
        ------
        StoreError
            Where there is a store already, or none can be.
        """
        StorePlaces.create(Path(directory), size, [Path(drive) for drive in drives])

    @property
    def counts(self) -> StoreCounts:
        """What it did for this process since it was opened, a copy."""
        counts = StoreCounts(**asdict(self._counts))
        counts.evicted_chunks = self.room.evicted_chunks
        return counts

    def statistics(self) -> dict[str, int | float]:
        """Return what the store holds now, by name."""
        return self.room.statistics()

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

    def find(
        self, namespace: Namespace, ids: Sequence[int], salt: bytes = b""
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
        """
        prefix = None
        try:
            self._check_process()
            prefix = self._find(namespace, ids, salt)
        except (OSError, StoreError) as error:
            self._failed(error)
        found = 0 if prefix is None else prefix.tokens
        self._counts.lookups += 1
        self._counts.hit_tokens += found
        self._counts.miss_tokens += len(ids) - found
        for chunk in [] if prefix is None else prefix.chunks:
            header = chunk.sheet.header
            self._counts.saved_seconds += header.cost * chunk.groups / header.groups
        return prefix

    def writer(
        self,
        namespace: Namespace,
        ids: Sequence[int],
        found: StoredPrefix | None = None,
        salt: bytes = b"",
        turn: int = 0,
    ) -> PrefixWriter | None:
        """Return what stores the rest of a prompt behind its stored prefix.

        None where nothing is left to store, or another process is about to store the same.

        Parameters
        ----------
        namespace, ids, salt
            As in `find`.
        found
            What `find` returned, open until the writer is closed.
        turn
            Which turn of a conversation this is, 1 the first; 0 where nobody knows.
        """
        try:
            self._check_process()
            root = root_key(namespace.digest, salt)
            keys = group_keys(root, ids)
            turn = turn or self._turns.of(keys[CHUNK_GROUPS - 1 :: CHUNK_GROUPS])
            stored = 0 if found is None else found.tokens // GROUP_TOKENS
            if len(keys) <= stored:
                return None
            stop = (stored // CHUNK_GROUPS + 1) * CHUNK_GROUPS
            if self.index.is_being_written(keys[min(stop, len(keys)) - 1]):
                return None
        except (OSError, StoreError) as error:
            self._failed(error)
            return None
        return PrefixWriter(
            self.room, self.files, self.places.pool, namespace, root, ids, found, self._failed, turn
        )

    def close(self) -> None:
        """Give leases and files back; harmless when done twice."""
        self._opened.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ----------------------------------------------------------------------------

    def _database(self, files: Sequence[PoolFile], clock: Callable[[], float]) -> Database:
        """Return the index' database, made anew from the drives where it is lost or broken."""
        path = self.places.index
        known = self._known_database()
        if known is not None:
            return known
        try:
            # One process at a time: of what one stores already, another that still looks at the
            # drives would take headers away.
            with self._alone():
                known = self._known_database()
                if known is not None:
                    return known
                for suffix in ("-wal", "-shm"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                if path.exists():
                    path.replace(path.with_suffix(".broken"))
                sweep(self.places.directory)
                scratch = ScratchPath.make_directory(self.places.directory, DriveCalls())
                try:
                    beside = scratch.path / path.name
                    units = [file.units for file in files]
                    with closing(Database.make(beside, self.places.pool, units)) as new:
                        rebuild(new, files, self.places.pool, clock())
                    beside.rename(path)
                finally:
                    scratch.remove()
        except OSError as error:
            raise StoreError(
                f"the index of the store {self.places.directory} cannot be made anew: "
                f"{reason_of(error)}; {way_out(error, 'choose another --store')}"
            ) from error
        return Database(path, self.places.pool)

    def _known_database(self) -> Database | None:
        """Return the index' database as it is; None where it must be made anew."""
        path = self.places.index
        if path.exists():
            try:
                return Database(path, self.places.pool)
            except StoreError as error:
                if not isinstance(error.__cause__, sqlite3.DatabaseError) or self._is_shared():
                    raise
        elif self._is_shared():
            raise StoreError(
                f"the index of the store {self.places.directory} is gone while other processes use "
                "it: end them, and it is made anew from what the drives hold"
            )
        return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process makes the index anew, and let none begin."""
        calls = DriveCalls()
        descriptor = calls.open(self.places.directory / ABOUT, os.O_RDONLY)
        try:
            while True:
                with suppress(BlockingIOError):
                    calls.lock(descriptor)
                    break
                time.sleep(_LOOK_SECONDS)
            yield
        finally:
            calls.close(descriptor)

    def _resume_turns(self) -> None:
        """Take up what earlier processes learned of conversations, where it is to be had."""
        noted = self.database.note(_TURNS)
        with suppress(ValueError, TypeError, AttributeError):
            self._turns.resume(json.loads(str(noted)) if noted is not None else {})

    def _is_shared(self) -> bool:
        """Return whether another process has the store open."""
        sweep(self.places.owners)
        return any(self.places.owners.iterdir())

    def _find(self, namespace: Namespace, ids: Sequence[int], salt: bytes) -> StoredPrefix | None:
        words = token_words(ids)
        data, digest = words.tobytes(), namespace.digest
        root = root_key(digest, salt)
        keys = group_keys(root, words)
        leased = self.index.lookup(keys, self._owner)
        expected = []
        for position, (_, groups) in enumerate(leased):
            first = position * CHUNK_GROUPS
            own_keys = keys[first : first + groups]
            own_ids = data[first * _GROUP_BYTES : (first + groups) * _GROUP_BYTES]
            expected.append(Expected(digest, keys[first - 1] if first else root, own_keys, own_ids))
        kept: list[StoredChunk] = []
        try:
            sheets = self._sheets.of([chunk for chunk, _ in leased], expected)
            for (chunk, groups), wanted, found in zip(leased, expected, sheets, strict=True):
                own = [
                    StoredChunk(chunk, sheet, slot, covered)
                    for slot, sheet in found
                    if (covered := wanted.covered_by(sheet))
                ]
                if not own:
                    self._quarantine(chunk, "what its drive says of it")
                    break
                # The newer one, where both are of the prompt.
                kept.append(max(own, key=lambda one: one.sheet.header.generation))
                if kept[-1].groups < groups:
                    break
        finally:
            # What is not kept is released whatever happened.
            gone = [chunk.number for chunk, _ in leased[len(kept) :]]
            if gone:
                self.index.release(self._owner, gone)
        if not kept:
            return None
        self.room.touch([chunk.record for chunk in kept])
        return StoredPrefix(kept, self.files, self._release, self._wrong)

    def _quarantine(self, chunk: Chunk, what: str) -> None:
        self._counts.quarantined_chunks += 1
        self._retirement.quarantine(chunk.number)
        self._failed(StoreError(f"{what} is not what was written to chunk {chunk.number}"))

    def _wrong(self, error: WrongBytesError) -> None:
        self._counts.quarantined_chunks += 1
        try:
            self._retirement.quarantine(error.chunk.record.number)
        except StoreError as failure:
            self._failed(failure)
        self._failed(error)

    def _release(self, chunks: list[int]) -> None:
        try:
            self.index.release(self._owner, chunks)
            self.room.write_due()
        except StoreError as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._counts.failures += 1
        self._counts.last_failure = str(error)
        if self._raising is not None:
            self._raising(error)

    def _leave(self) -> None:
        try:
            self.room.write_touched()
            self.database.set_notes({_TURNS: json.dumps(self._turns.state())})
            self.index.remove_owner(self._owner)
            self.room.clear_tombed()
        except (OSError, HillInferError) as error:
            # Whoever opens the store next collects what this process leaves.
            self._counts.last_failure = str(error)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                "this store was opened before the process forked: open it again in the child"
            )
