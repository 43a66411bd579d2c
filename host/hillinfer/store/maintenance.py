# SPDX-License-Identifier: Apache-2.0
"""What keeps a store in order: making its index anew from the drives, and looking at all bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hillinfer.drive.calls import Reads
from hillinfer.drive.files import PAGE_BYTES, aligned_buffer
from hillinfer.store.database import Database, State
from hillinfer.store.extent import (
    UNIT_BYTES,
    ExtentShape,
    Header,
    Sheet,
    read_header,
    read_sheets,
)
from hillinfer.store.pool_files import PoolFile, Span

# Headers that are read at once.
_AT_ONCE = 512
_THREADS = 16


@dataclass(frozen=True)
class Found:
    """A chunk that a drive holds.

    Parameters
    ----------
    span, sheet
        Where it lies, and what its newer whole sheet says.
    """

    span: Span
    sheet: Sheet

    @property
    def header(self) -> Header:
        """Its header."""
        return self.sheet.header


def rebuild(database: Database, files: Sequence[PoolFile], pool: bytes, now: float) -> int:
    """Fill an empty index with what the drives hold; return how many chunks that are.

    Chunks whose prefix is not there are left out, and so is all but the newest of a key.

    Parameters
    ----------
    database
        Of a new index.
    files, pool
        The store's.
    now
        The time, in seconds.

    Raises
    ------
    OSError
        Where a drive cannot be read.
    """
    newest: dict[bytes, Found] = {}
    left_out = []
    for drive, file in enumerate(files):
        for found in _scan(file, drive, pool):
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
                    header.position, header.groups, now, header.cost, header.turn, now,
                ),
            )  # fmt: skip
            number = int(added.lastrowid or 0)
            db.executemany(
                "INSERT OR IGNORE INTO prefix VALUES (?, ?, ?)",
                [(key, number, groups) for groups, key in enumerate(one.sheet.group_keys, 1)],
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


def _scan(file: PoolFile, drive: int, pool: bytes) -> Iterator[Found]:
    """Yield the chunks that a file holds."""
    units = file.byte_count // UNIT_BYTES
    size = 2 * PAGE_BYTES
    memory = aligned_buffer(_AT_ONCE * size)
    unit = 1
    while unit < units:
        count = min(_AT_ONCE, units - unit)
        places = np.arange(count)
        file.read_many(
            Reads((unit + places) * UNIT_BYTES, places * size, np.full(count, size)),
            memory,
            _THREADS,
        )
        following = unit + count
        at = unit
        while at < unit + count:
            pages = memory[(at - unit) * size :][:size].tobytes()
            found = _found(file, Span(drive, at, 1), pages, pool)
            if found is not None:
                yield found
            at += 1 if found is None else found.span.units
        unit = max(following, at)


def _found(file: PoolFile, span: Span, pages: bytes, pool: bytes) -> Found | None:
    headers = [
        header
        for start in (0, PAGE_BYTES)
        if (header := read_header(pages[start : start + PAGE_BYTES], pool)) is not None
    ]
    best: Sheet | None = None
    for shape in {header[0].shape for header in headers}:
        for _, sheet in _sheets(file, span.offset, shape, pool):
            if best is None or best.header.generation < sheet.header.generation:
                best = sheet
    if best is None:
        return None
    return Found(Span(span.drive, span.unit, best.header.shape.units), best)


def _sheets(
    file: PoolFile, offset: int, shape: ExtentShape, pool: bytes
) -> list[tuple[int, Sheet]]:
    if offset + shape.byte_count > file.byte_count:
        return []
    data = aligned_buffer(shape.sheets_bytes)
    file.read(data, offset)
    return read_sheets(data.tobytes(), shape, pool)
