# SPDX-License-Identifier: Apache-2.0
"""What a store holds, and what changed since it was looked at last."""

from __future__ import annotations

from collections.abc import Iterable

from hillinfer.store.database import Database, State
from hillinfer.store.store import Store
from hillinfer_hosts.directory import HELD_BYTES, Change, HostsError

# Numbers of one query.
_BATCH = 512


class HeldPrefixes:
    """Looks at the index of a store that other processes fill, and tells differences.

    Chunks that are new are looked at alone. Where one is gone, everything is looked at: what it
    had in common with others is found through these then.

    Parameters
    ----------
    store
        Open; not encrypted.

    Raises
    ------
    HostsError
        Where the store is encrypted: nobody else could make the keys of its prefixes.
    """

    def __init__(self, store: Store) -> None:
        if store.keys.tag_bytes:
            raise HostsError(
                f"the store {store.places.directory} is encrypted: keys of its prefixes are made "
                "with a key that no router has; serve this host without an agent"
            )
        self._database: Database = store.database
        self._chunks: dict[int, tuple[int, int]] = {}
        self._held: set[bytes] = set()

    def namespaces(self) -> tuple[bytes, ...]:
        """Return the digests of the namespaces that it has rows of."""
        rows = self._database.rows(
            "SELECT DISTINCT n.digest FROM namespace n JOIN chunk c ON c.namespace = n.id "
            f"WHERE c.state = {State.READY:d} ORDER BY n.id"
        )
        return tuple(digest for (digest,) in rows)

    def everything(self) -> Change:
        """Return all that is held, and go on from there."""
        self._chunks, self._held = self._listed(), self._all()
        return Change(sorted(self._held), is_whole=True)

    def change(self) -> Change:
        """Return what changed since the last call."""
        now = self._listed()
        if now == self._chunks:
            return Change()
        # A number is given again once its chunk is gone: one that has no more groups than before
        # has others.
        if all(
            number in now and (now[number] == one or now[number][1] > one[1])
            for number, one in self._chunks.items()
        ):
            fresh = [number for number, one in now.items() if self._chunks.get(number) != one]
            held = self._held | self._of(fresh)
        else:
            held = self._all()
        change = Change(sorted(held - self._held), sorted(self._held - held))
        self._chunks, self._held = now, held
        return change

    # --- inside ----------------------------------------------------------------------------

    def _listed(self) -> dict[int, tuple[int, int]]:
        """Return generation and groups of each chunk that can be found."""
        rows = self._database.rows(
            f"SELECT id, generation, groups FROM chunk WHERE state = {State.READY:d}"
        )
        return {number: (generation, groups) for number, generation, groups in rows}

    def _all(self) -> set[bytes]:
        return _first_bytes(
            self._database.rows(
                "SELECT p.hash FROM prefix p JOIN chunk c ON c.id = p.chunk "
                f"WHERE c.state = {State.READY:d}"
            )
        )

    def _of(self, numbers: list[int]) -> set[bytes]:
        found: set[bytes] = set()
        for start in range(0, len(numbers), _BATCH):
            part = numbers[start : start + _BATCH]
            marks = ", ".join("?" * len(part))
            found |= _first_bytes(
                self._database.rows(f"SELECT hash FROM prefix WHERE chunk IN ({marks})", part)
            )
        return found


def _first_bytes(rows: Iterable[tuple[bytes]]) -> set[bytes]:
    return {key[:HELD_BYTES] for (key,) in rows}
