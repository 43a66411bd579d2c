# SPDX-License-Identifier: Apache-2.0
"""A table of keys, nonces and tags by which groups in sealed extents are decrypted as they land."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.landing import Seals
from hillinfer.drive.shared_files import ReadFile
from hillinfer.memory_budget import Accountant, Part
from hillinfer.native.library import native_library
from hillinfer.native.structures import PageSeal
from hillinfer.secrecy.library import WrongTagError
from hillinfer.secrecy.pages import PageCipher, Pages

_WORDS = ctypes.sizeof(PageSeal) // 8


def can_open() -> bool:
    """Whether this machine opens pages of sealed extents while their rows land."""
    return native_library().has_page_cipher


@dataclass(frozen=True)
class _Lines:
    """The table as it is at one moment, int64 (groups, words), and what its addresses point to."""

    table: NDArray[np.int64]
    users: Mapping[PageCipher, int]


class GroupSeals:
    """Knows for each group of a cold pool that lies in a sealed extent what opens its pages.

    Any thread may read while another places groups that nobody reads yet.

    Parameters
    ----------
    accountant
        Counts the tags of extents that groups lie in.
    group_bytes
        Bytes of a group in one layer.
    """

    def __init__(self, accountant: Accountant, group_bytes: int) -> None:
        self._accountant = accountant
        self._group_bytes = group_bytes
        # It grows by being replaced.
        self._lines = _Lines(np.zeros((0, _WORDS), np.int64), MappingProxyType({}))
        # Of each group its extent's pages, and where that begins in its file.
        self._places: dict[int, tuple[PageCipher, int]] = {}
        self._changing = threading.Lock()

    def make_room(self, pages: Pages) -> None:
        """Make room in memory for the tags of an extent, once.

        Raises
        ------
        BudgetError
            Where there is none.
        """
        with self._changing:
            if isinstance(pages, PageCipher) and pages not in self._lines.users:
                self._accountant.take(Part.OTHER, pages.tag_bytes)
                self._lines = _Lines(self._lines.table, {**self._lines.users, pages: 0})

    def take_spare(self, pages: Pages) -> bool:
        """Make room if there is some as things are, and say whether groups may lie in an extent.

        They may in a plain one, and in a sealed one where the system opens pages as they land.
        """
        if not isinstance(pages, PageCipher):
            return True
        with self._changing:
            if pages in self._lines.users:
                return True
            if not can_open() or not self._accountant.take_spare(Part.OTHER, pages.tag_bytes):
                return False
            self._lines = _Lines(self._lines.table, {**self._lines.users, pages: 0})
            return True

    def place(self, groups: Mapping[int, int], pages: Pages, origin: int) -> None:
        """Let groups lie in an extent that there is room for.

        Parameters
        ----------
        groups
            Their numbers, and which of the extent's they are.
        pages
            What their pages go through, tags read.
        origin
            The byte of its file that the extent begins at.
        """
        if not isinstance(pages, PageCipher):
            return
        with self._changing:
            # Each layer's rows of a group tell of it.
            new = {group: at for group, at in groups.items() if group not in self._places}
            table = self._covering(max(new, default=-1) + 1)
            for group, at in new.items():
                part = pages.part(at)
                table[group] = (
                    part.key_address,
                    part.tags.ctypes.data,
                    0,
                    origin + part.start,
                    len(part.tags),
                    0,
                )
                self._places[group] = pages, origin
            users = dict(self._lines.users)
            users[pages] = users.get(pages, 0) + len(new)
            self._lines = _Lines(table, users)

    def leave(self, groups: Sequence[int]) -> None:
        """Forget groups that nobody reads any more."""
        with self._changing:
            users, left = dict(self._lines.users), set()
            for group in groups:
                pages, _ = self._places.pop(group, (None, 0))
                if pages is not None:
                    users[pages] -= 1
                    left.add(pages)
                    self._lines.table[group] = 0
            # Those that there is only room for yet are another thread's, which places groups next.
            for pages in left:
                if not users[pages]:
                    del users[pages]
                    self._accountant.give(Part.OTHER, pages.tag_bytes)
            self._lines = _Lines(self._lines.table, users)

    @property
    def seals(self) -> Seals:
        """What the native library opens pages with."""
        lines = self._lines
        return Seals(lines.table.ctypes.data, len(lines.table), 1, lines)

    def open(self, file: ReadFile, group: int, start: int, piece: memoryview, offset: int) -> None:
        """Open whole pages of groups that lie one behind the other, in their place.

        Parameters
        ----------
        file
            Raises its error where they are other ones.
        group, start
            The first of the groups, and the byte of the file that it begins at.
        piece, offset
            The pages, from some byte of the file on.
        """
        data = np.frombuffer(piece, np.uint8)
        done = 0
        while done < len(data):
            number, begun = divmod(offset + done - start, self._group_bytes)
            count = min(self._group_bytes - begun, len(data) - done)
            pages, origin = self._places[group + number]
            try:
                pages.open(offset + done - origin, data[done : done + count])
            except WrongTagError as error:
                raise file.changed(count, offset + done) from error
            done += count

    def _covering(self, groups: int) -> NDArray[np.int64]:
        table = self._lines.table
        if groups <= len(table):
            return table
        larger = np.zeros((max(groups, 2 * len(table)), _WORDS), np.int64)
        larger[: len(table)] = table
        return larger
