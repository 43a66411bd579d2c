# SPDX-License-Identifier: Apache-2.0
"""Maintains a store: rebuilds its index from the drives, and verifies every stored byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.files import PAGE_BYTES, aligned_buffer
from hillinfer.secrecy.library import WrongTagError
from hillinfer.secrecy.pages import Pages, Place
from hillinfer.secrecy.store_keys import StoreKeys
from hillinfer.store.database import Database, State
from hillinfer.store.eviction import EvictionPolicy
from hillinfer.store.extent import Header, Sheet, read_sheets, shape_of
from hillinfer.store.keys import CHUNK_TOKENS, UNIT_BYTES, ExtentShape, group_sums
from hillinfer.store.pool_files import PoolFile, Span, StoreError, place_of
from hillinfer.store.room import facts_of
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Headers that are looked for at once, and sheets that are read at once.
_AT_ONCE = 512
_SHEETS_AT_ONCE = 128
_THREADS = 16


@dataclass(frozen=True)
class Found:
    """A chunk that a drive holds.

    Parameters
    ----------
    span
        Where it lies.
    header, keys
        What its newer whole sheet says, and the keys of the prefixes that end with its groups.
    """

    span: Span
    header: Header
    keys: Sequence[bytes]

    @classmethod
    def of(cls, drive: int, unit: int, sheets: Sequence[tuple[int, Sheet]]) -> Found | None:
        """Return what lies at a place, None where no sheet is whole."""
        if not sheets:
            return None
        best = max((one for _, one in sheets), key=lambda one: one.header.generation)
        span = Span(drive, unit, best.header.shape.units)
        return cls(span, best.header, best.group_keys)


def rebuild(
    database: Database,
    files: Sequence[PoolFile],
    pool: bytes,
    keys: StoreKeys,
    policy: EvictionPolicy,
    now: float,
) -> int:
    """Fill an empty index with what the drives hold; return how many chunks that are.

    Chunks whose prefix is not there are left out, and so is all but the newest of a key.

    Parameters
    ----------
    database
        Of a new index.
    files, pool, keys
        The store's.
    policy
        Says what chunks are worth, of which the index alone knew how often they were found.
    now
        The time, in seconds.

    Raises
    ------
    OSError
        Where a drive cannot be read.
    SecrecyError
        Where the store is encrypted and there is no key.
    """
    newest: dict[bytes, Found] = {}
    left_out = []
    for drive, file in enumerate(files):
        for found in _scan(file, drive, pool, keys):
            known = newest.get(found.header.key)
            if known is None or known.header.generation < found.header.generation:
                newest[found.header.key] = found
            else:
                known = found
            left_out += [] if known is None else [known]
    full: dict[bytes, int] = {}
    with database.transaction() as db:
        namespaces: dict[bytes, int] = {}
        count = most = 0
        for one in sorted(newest.values(), key=lambda one: one.header.position):
            header = one.header
            if header.position and header.parent not in full:
                left_out.append(one)
                continue
            if header.namespace not in namespaces:
                added = db.execute(
                    "INSERT INTO namespace(digest, about, layers, row_bytes, shadow_bytes) "
                    "VALUES (?, '', ?, ?, ?)",
                    (header.namespace, header.layers, header.row_bytes, header.shadow_bytes),
                )
                namespaces[header.namespace] = int(added.lastrowid or 0)
            parent = full.get(header.parent)
            added = db.execute(
                "INSERT INTO chunk(namespace, drive, unit, units, generation, state, key, parent, "
                "parent_key, position, groups, children, hits, last, cost, turn, pinned, worth) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, ?, ?, ?, 0, ?)",
                (
                    namespaces[header.namespace], one.span.drive, one.span.unit, one.span.units,
                    header.generation, State.READY, header.key, parent, header.parent,
                    header.position, header.groups, now, header.cost, header.turn,
                    policy.worth(facts_of(header, now), age=0.0),
                ),
            )  # fmt: skip
            number = int(added.lastrowid or 0)
            db.executemany(
                "INSERT OR IGNORE INTO prefix VALUES (?, ?, ?)",
                [(key, number, groups) for groups, key in enumerate(one.keys, 1)],
            )
            if parent is not None:
                db.execute("UPDATE chunk SET children = children + 1 WHERE id = ?", (parent,))
            if header.is_full:
                full[header.key] = number
            count, most = count + 1, max(most, header.generation)
        db.execute("INSERT OR REPLACE INTO meta VALUES ('generation', ?)", (most,))
        _fill_free(db.execute, files)
        # Before their room is anybody's: their headers would be found over another's rows.
        blank = aligned_buffer(2 * PAGE_BYTES)
        for one in left_out:
            files[one.span.drive].write(blank, one.span.offset)
        for file in files:
            file.settle()
    return count


def _fill_free(
    execute: Callable[..., Iterator[tuple[int, int]]], files: Sequence[PoolFile]
) -> None:
    """Note all room that no chunk takes."""
    execute("DELETE FROM free")
    for drive, file in enumerate(files):
        at = 1
        taken = list(
            execute("SELECT unit, units FROM chunk WHERE drive = ? ORDER BY unit", (drive,))
        )
        for unit, units in [*taken, (file.units + 1, 0)]:
            if unit > at:
                execute("INSERT INTO free VALUES (?, ?, ?)", (drive, at, unit - at))
            at = unit + units


def _scan(file: PoolFile, drive: int, pool: bytes, keys: StoreKeys) -> Iterator[Found]:
    """Yield the chunks that a file holds."""
    units, unit = file.byte_count // UNIT_BYTES, 1
    while unit < units:
        likely = _likely(file, unit, units, pool, keys)
        found = next(filter(None, (_found(file, drive, at, pool, keys) for at in likely)), None)
        if found is None:
            return
        yield found
        unit = found.span.unit + found.span.units
        # Extents of one model lie one behind the other: no unit between them need be looked at.
        for following in _row(file, drive, unit, found.header.shape, pool, keys):
            yield following
            unit += following.span.units


def _likely(file: PoolFile, unit: int, units: int, pool: bytes, keys: StoreKeys) -> Iterator[int]:
    """Yield the units from one on that begin with a header."""
    size = 2 * PAGE_BYTES
    memory = aligned_buffer(_AT_ONCE * size)
    for start in range(unit, units, _AT_ONCE):
        places = np.arange(min(_AT_ONCE, units - start))
        file.read_many(
            Reads((start + places) * UNIT_BYTES, places * size, np.full(len(places), size)),
            memory,
            _THREADS,
        )
        for at in places.tolist():
            if _shapes(memory[at * size : (at + 1) * size].tobytes(), pool, keys):
                yield start + at


def _row(
    file: PoolFile, drive: int, unit: int, shape: ExtentShape, pool: bytes, keys: StoreKeys
) -> Iterator[Found]:
    """Yield the chunks of one shape that lie one behind the other from a unit on."""
    size, units = shape.sheets_bytes, file.byte_count // UNIT_BYTES
    memory = aligned_buffer(_SHEETS_AT_ONCE * size)
    while count := min(_SHEETS_AT_ONCE, (units - unit) // shape.units):
        places = np.arange(count)
        offsets = (unit + places * shape.units) * UNIT_BYTES
        file.read_many(Reads(offsets, places * size, np.full(count, size)), memory, _THREADS)
        for at in places.tolist():
            data = memory[at * size : (at + 1) * size]
            place = place_of(Span(drive, unit, shape.units), pool)
            found = Found.of(drive, unit, read_sheets(data, shape, place, keys))
            # Those with other room behind their planes have another place after them.
            if found is None or found.span.units != shape.units:
                return
            yield found
            unit += shape.units


def _found(file: PoolFile, drive: int, unit: int, pool: bytes, keys: StoreKeys) -> Found | None:
    pages = aligned_buffer(2 * PAGE_BYTES)
    file.read(pages, unit * UNIT_BYTES)
    span, sheets = Span(drive, unit, 1), []
    for shape in _shapes(pages.tobytes(), pool, keys):
        sheets += _sheets(file, span, shape, pool, keys)
    return Found.of(drive, unit, sheets)


def _shapes(pages: bytes, pool: bytes, keys: StoreKeys) -> set[ExtentShape]:
    """Return the shapes that the headers on two pages tell, none where they are none."""
    shapes = (shape_of(pages[at : at + PAGE_BYTES], pool, keys) for at in (0, PAGE_BYTES))
    return {shape for shape in shapes if shape is not None}


def _sheets(
    file: PoolFile, span: Span, shape: ExtentShape, pool: bytes, keys: StoreKeys
) -> list[tuple[int, Sheet]]:
    if span.offset + shape.byte_count > file.byte_count:
        return []
    data = aligned_buffer(shape.sheets_bytes)
    file.read(data, span.offset)
    return read_sheets(data, shape, place_of(span, pool), keys)


# --- What is stored, by the prompts it came from ---


@dataclass(frozen=True)
class StoredChain:
    """A stored prefix that nothing longer goes on from.

    Parameters
    ----------
    name
        What it is called in commands: the first digits of its key.
    namespace
        The first digits of its namespace' digest.
    tokens
        How many tokens it has; others may begin with the same.
    own_bytes
        Bytes of its last chunk's extent, which `remove` gives back.
    hits, last
        How often its last chunk was found, decayed, and when the last time, in seconds since 1970.
    is_pinned
        Whether it stays where room is short.
    """

    name: str
    namespace: str
    tokens: int
    own_bytes: int
    hits: float
    last: float
    is_pinned: bool


_NAME_DIGITS = 12


def chains(database: Database) -> list[StoredChain]:
    """Return all stored prefixes that nothing goes on from, those used last first."""
    return [
        StoredChain(
            key.hex()[:_NAME_DIGITS],
            digest.hex()[:_NAME_DIGITS],
            position * CHUNK_TOKENS + groups * GROUP_TOKENS,
            units * UNIT_BYTES,
            hits,
            last,
            bool(pinned),
        )
        for key, digest, position, groups, units, hits, last, pinned in database.rows(
            "SELECT c.key, n.digest, c.position, c.groups, c.units, c.hits, c.last, c.pinned "
            "FROM chunk c JOIN namespace n ON n.id = c.namespace "
            f"WHERE c.state = {State.READY:d} AND c.children = 0 ORDER BY c.last DESC, c.id"
        )
    ]


def chunks_of(database: Database, name: str) -> list[int]:
    """Return the numbers of a stored prefix' chunks in the index, the last one first.

    Parameters
    ----------
    database
        The index'.
    name
        First digits of its key.

    Raises
    ------
    StoreError
        Where none has that name, or several do.
    """
    wanted = name.lower()
    found = [
        number
        for number, key in database.rows(
            f"SELECT id, key FROM chunk WHERE state = {State.READY:d} AND children = 0"
        )
        if key.hex().startswith(wanted)
    ]
    if len(found) != 1 or not wanted:
        what = "nothing stored is" if not found else f"{len(found)} stored prefixes are"
        raise StoreError(f"{what} called '{name}': hillinfer store ls names all that is stored")
    return chain_of(database, found[0])


def chain_of(database: Database, number: int) -> list[int]:
    """Return a chunk's number and those of all before it, the last one first.

    What comes before one that was damaged and is gone is no part of it.
    """
    return [
        one
        for (one,) in database.rows(
            "WITH RECURSIVE up(id, parent, parent_key, position) AS ("
            "SELECT id, parent, parent_key, position FROM chunk WHERE id = ? UNION ALL "
            "SELECT c.id, c.parent, c.parent_key, c.position FROM chunk c JOIN up u "
            f"ON c.id = u.parent AND c.key = u.parent_key AND c.state = {State.READY:d}) "
            "SELECT id FROM up ORDER BY position DESC",
            (number,),
        )
    ]


def pin(database: Database, name: str, how: Literal[0, 1]) -> int:
    """Let all chunks of a stored prefix stay where room is short (1), or go (0); return how many.

    Raises
    ------
    StoreError
        As `chunks_of` says.
    """
    numbers = chunks_of(database, name)
    with database.transaction() as db:
        db.executemany("UPDATE chunk SET pinned = ? WHERE id = ?", [(how, one) for one in numbers])
    return len(numbers)


# --- Looking at all bytes ---


class Parts(StrEnum):
    """What of every chunk is compared with its checksums."""

    SHEETS = "sheets"
    """Headers, token numbers and checksums alone: some pages of each."""
    ALL = "all"
    """All rows and shadows too: the whole store is read."""


@dataclass(frozen=True)
class Verified:
    """What looking at all chunks found.

    Parameters
    ----------
    chunks, byte_count
        Looked at.
    wrong
        Chunks that are not as they were written; nobody finds them any more.
    """

    chunks: int
    byte_count: int
    wrong: int


def verify(
    database: Database,
    files: Sequence[PoolFile],
    pool: bytes,
    keys: StoreKeys,
    quarantine: Callable[[int], None],
    parts: Parts,
    on_progress: Callable[[int, int], None] = lambda done, all_of_them: None,
) -> Verified:
    """Compare every chunk with its checksums, after the index as a whole.

    Parameters
    ----------
    database, files, pool, keys
        The store's.
    quarantine
        Told the number of each that is wrong.
    parts
        What is looked at of each.
    on_progress
        Called with how many chunks are done, and of how many.

    Raises
    ------
    StoreError
        Where the index is broken.
    SecrecyError
        Where the store is encrypted and there is no key.
    """
    database.check()
    rows = database.rows(
        "SELECT c.id, c.drive, c.unit, c.units, c.key, n.layers, n.row_bytes, n.shadow_bytes "
        f"FROM chunk c JOIN namespace n ON n.id = c.namespace WHERE c.state = {State.READY:d} "
        "ORDER BY c.drive, c.unit"
    )
    looked = wrong = 0
    for done, (number, drive, unit, units, key, *sizes) in enumerate(rows, 1):
        shape = replace(ExtentShape(*sizes), tag_bytes=keys.tag_bytes)
        span = Span(drive, unit, units)
        try:
            right, size = _verified(
                files[drive], span, shape, place_of(span, pool), keys, key, parts
            )
        except OSError:
            right, size = False, 0
        looked += size
        if not right:
            # It may have gone, or gone on, since the list was made.
            now = database.rows(
                f"SELECT key FROM chunk WHERE id = ? AND state = {State.READY:d}", (number,)
            )
            if now == [(key,)]:
                wrong += 1
                quarantine(number)
        on_progress(done, len(rows))
    return Verified(len(rows), looked, wrong)


def _verified(
    file: PoolFile,
    span: Span,
    shape: ExtentShape,
    place: Place,
    keys: StoreKeys,
    key: bytes,
    parts: Parts,
) -> tuple[bool, int]:
    """Return whether a chunk is as it was written, and how many bytes were looked at."""
    sheets = _sheets(file, span, shape, place.pool, keys)
    looked = shape.sheets_bytes
    own = [one for _, one in sheets if key in (one.header.key, *one.group_keys)]
    if not own:
        return False, looked
    if parts is Parts.SHEETS:
        return True, looked
    sheet = max(own, key=lambda one: one.header.generation)
    groups = sheet.header.groups
    pages = sheet.pages(place)
    if pages.wants_tags:
        tags = aligned_buffer(shape.tag_plane_bytes)
        file.read(tags, span.offset + shape.tags_at)
        looked += len(tags)
        pages.take_tags(tags)
    rows = aligned_buffer(groups * shape.group_bytes)[: groups * shape.group_bytes]
    shadow = aligned_buffer(max(1, shape.shadow_bytes))
    for layer in range(shape.layers):
        looked += len(rows)
        try:
            _read_opened(file, span, shape.rows_at(layer), pages, rows)
            if sheet.header.has_shadow:
                looked += len(shadow)
                _read_opened(file, span, shape.shadow_at(layer), pages, shadow)
        except WrongTagError:
            return False, looked
        sums = group_sums(rows.reshape(-1, shape.row_bytes), sheet.row_salts(layer, 0, groups))
        if (sums != sheet.row_sums[layer, :groups]).any():
            return False, looked
        if sheet.header.has_shadow:
            own_sum = group_sums(shadow, sheet.shadow_salt(layer))[0]
            if own_sum != sheet.shadow_sums[layer]:
                return False, looked
    return True, looked


def _read_opened(
    file: PoolFile, span: Span, at: int, pages: Pages, into: NDArray[np.uint8]
) -> None:
    file.read(into, span.offset + at)
    pages.open(at, into)
