# SPDX-License-Identifier: Apache-2.0
"""Lists what a store holds of each model, and the tokens of a stored prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import reason_of
from hillinfer.store.database import Database, State
from hillinfer.store.extent import read_sheets
from hillinfer.store.keys import CHUNK_TOKENS, UNIT_BYTES, ExtentShape
from hillinfer.store.maintenance import chunks_of
from hillinfer.store.pool_files import Span, StoreError, place_of
from hillinfer.store.store import Store
from hillinfer_model.kernel_spec import GROUP_TOKENS

# As `StoredChain` has them.
_NAME_DIGITS = 12


@dataclass(frozen=True)
class Holding:
    """What a store holds of one namespace.

    Parameters
    ----------
    namespace
        The first digits of its digest.
    chunks, tokens
        That can be found.
    row_bytes, waste_bytes
        Bytes of their rows and shadows, and of what is left empty in their extents.
    pinned_bytes
        How many of the rows' bytes stay where room is short.
    """

    namespace: str
    chunks: int
    tokens: int
    row_bytes: int
    waste_bytes: int
    pinned_bytes: int


def holdings(database: Database) -> list[Holding]:
    """Return what is held of each namespace, the most bytes first."""
    rows = database.rows(
        "SELECT n.digest, count(*), sum(c.groups), sum(b.rows), sum(c.units) * ?1, "
        "sum(b.rows * (c.pinned <> 0)) FROM chunk c JOIN namespace n ON n.id = c.namespace "
        "JOIN (SELECT c.id, n.layers * (c.groups * ?2 * n.row_bytes + n.shadow_bytes) AS rows "
        "FROM chunk c JOIN namespace n ON n.id = c.namespace) b ON b.id = c.id "
        f"WHERE c.state = {State.READY:d} GROUP BY n.id ORDER BY sum(b.rows) DESC",
        (UNIT_BYTES, GROUP_TOKENS),
    )
    return [
        Holding(digest.hex()[:_NAME_DIGITS], chunks, groups * GROUP_TOKENS, own, room - own, pinned)
        for digest, chunks, groups, own, room, pinned in rows
    ]


def token_ids(store: Store, name: str) -> list[int]:
    """Return the token numbers of a stored prefix.

    Parameters
    ----------
    store
        Open, with its key where it is encrypted.
    name
        First digits of its key, as `chains` gives them.

    Raises
    ------
    StoreError
        Where nothing, or more than one, is called so, or a chunk is not as it was written.
    """
    return _ids_of(store, chunks_of(store.database, name)[::-1], f"'{name}'")


def prefix_ids(store: Store, key: bytes) -> list[int]:
    """Return the token numbers of a stored prefix by its key, whether others go on from it or not.

    Parameters
    ----------
    store
        Open, with its key where it is encrypted.
    key
        Of all its tokens, as `StoredPrompts.stored_key` gives it.

    Raises
    ------
    StoreError
        Where it is not stored any more, or a chunk is not as it was written.
    """
    rows = store.database.rows(
        "SELECT p.chunk, p.groups, c.position FROM prefix p JOIN chunk c ON c.id = p.chunk "
        f"WHERE p.hash = ? AND c.state = {State.READY:d}",
        (key,),
    )
    if not rows:
        raise StoreError("its rows are gone from the store")
    last, groups, position = rows[0]
    numbers: list[int] = []
    above: int | None = last
    while above is not None:
        numbers.append(above)
        ((above,),) = store.database.rows("SELECT parent FROM chunk WHERE id = ?", (above,))
    ids = _ids_of(store, numbers[::-1], "it")
    return ids[: position * CHUNK_TOKENS + groups * GROUP_TOKENS]


def _ids_of(store: Store, numbers: Sequence[int], what: str) -> list[int]:
    """Return the token numbers of chunks, the first one first; `what` they are is for errors."""
    found: list[int] = []
    for number in numbers:
        ((drive, unit, units, key, *sizes),) = store.database.rows(
            "SELECT c.drive, c.unit, c.units, c.key, n.layers, n.row_bytes, n.shadow_bytes "
            "FROM chunk c JOIN namespace n ON n.id = c.namespace WHERE c.id = ?",
            (number,),
        )
        span = Span(drive, unit, units)
        shape = replace(ExtentShape(*sizes), tag_bytes=store.keys.tag_bytes)
        data = aligned_buffer(shape.sheets_bytes)
        try:
            store.files[drive].read(data, span.offset)
        except OSError as error:
            raise StoreError(f"{what} cannot be read: {reason_of(error)}") from error
        place = place_of(span, store.places.pool)
        sheets = read_sheets(data, shape, place, store.keys)
        own = [sheet for _, sheet in sheets if sheet.header.key == key]
        if not own:
            raise StoreError(f"{what} is not whole: run hillinfer store verify")
        found += own[0].ids[: own[0].header.groups * GROUP_TOKENS].tolist()
    return found
