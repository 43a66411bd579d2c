# SPDX-License-Identifier: Apache-2.0
"""Block tables of a cold pool: allocated groups, their reference counts, and where each lies."""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import IOMode
from hillinfer.drive.landing import Seals
from hillinfer.drive.shared_files import ReadFile, RowBase, begins_like

# --- Who owns groups ---


@dataclass(order=True)
class _Region:
    first: int
    count: int = field(compare=False)
    # Groups in it that somebody owns.
    in_use: int = field(default=0, compare=False)
    # Who fills it, and has not shared any of its groups yet.
    holds: int = field(default=0, compare=False)


class GroupTable:
    """Hands out group numbers, lowest first, and counts who shares them.

    A region is a run of groups that lie in files which are never written: they may be shared and
    given back, and nobody gets them to write to. Their numbers can be handed out again once the
    region is closed.

    Attributes
    ----------
    parts_in_use
        What sequences own, in whole groups: of some they use a part. To be looked at.
    """

    def __init__(self) -> None:
        self._owners: list[int] = []
        # A heap.
        self._free: list[int] = []
        # Of groups that are used in part: which part.
        self._parts: dict[int, float] = {}
        self.parts_in_use = 0.0
        # By their first group.
        self._regions: list[_Region] = []

    @property
    def groups(self) -> int:
        """One more than the highest group number ever handed out or in a region."""
        return len(self._owners)

    def take(self, part: float = 1.0) -> int:
        """Return a group nobody owns, owned once from now on.

        Parameters
        ----------
        part
            How much of it will be used, above 0 and up to 1: it has room in every layer.
        """
        self.parts_in_use += part
        if self._free:
            group = heapq.heappop(self._free)
            self._owners[group] = 1
        else:
            self._owners.append(1)
            group = len(self._owners) - 1
        if part < 1:
            self._parts[group] = part
        return group

    def share(self, group: int) -> None:
        """Count one more owner; a group of a region may have had none."""
        if not self._owners[group]:
            region = self._region_of(group)
            if region is None:
                raise ValueError(f"nobody owns group {group}, which lies in no region")
            region.in_use += 1
            self.parts_in_use += 1
        self._owners[group] += 1

    def of_one_owner(self, groups: Iterable[int]) -> list[int]:
        """Return those of some groups that nobody would own once they are given back.

        Each is given back as often as it is among them.
        """
        given = Counter(groups)
        return [group for group, times in given.items() if self._owners[group] == times]

    def give(self, group: int) -> bool:
        """Count one owner less and say whether nobody owns the group now."""
        self.give_all([group])
        return not self._owners[group]

    def give_all(self, groups: list[int]) -> None:
        """Count one owner less of each of some groups, which leave the list as that is done.

        Where Ctrl-C breaks it off, what is still in the list is still owned.
        """
        while groups:
            group = groups[-1]
            region = self._region_of(group)
            # Ctrl-C comes behind calls, and there is none among these.
            del groups[-1]
            self._owners[group] -= 1
            if self._owners[group]:
                continue
            if group in self._parts:
                self.parts_in_use -= self._parts[group]
                del self._parts[group]
            else:
                self.parts_in_use -= 1
            if region is None:
                self._free += [group]
            else:
                region.in_use -= 1
        heapq.heapify(self._free)

    # --- regions ---------------------------------------------------------------------------

    def open_region(self, count: int) -> int:
        """Return the first of so many groups in a row that nobody owns, a region from now on.

        It is held until `let_go`, although nobody owns a group of it yet.
        """
        first = self._run(count)
        self._free = sorted(group for group in self._free if not first <= group < first + count)
        self._owners.extend([0] * (first + count - len(self._owners)))
        insort(self._regions, _Region(first, count, holds=1))
        return first

    def seal(self, count: int) -> None:
        """Make the first `count` groups a region, which somebody owns.

        It takes the place of one that begins with them already, which an interrupt left without its
        files.
        """
        self._free = sorted(group for group in self._free if group >= count)
        in_use = sum(owners > 0 for owners in self._owners[:count])
        others = [region for region in self._regions if region.first]
        self._regions = [_Region(0, count, in_use), *others]

    def hold(self, first: int) -> None:
        """Keep the region that begins with a group open until `let_go`."""
        self._regions[bisect_right(self._regions, _Region(first, 0)) - 1].holds += 1

    def let_go(self, first: int) -> None:
        """Undo `hold`, or the hold of `open_region`."""
        self._regions[bisect_right(self._regions, _Region(first, 0)) - 1].holds -= 1

    def let_all_go(self) -> None:
        """Undo all holds that Ctrl-C left, where nobody fills a region: one at a time does."""
        for region in self._regions:
            region.holds = 0

    def close_idle_regions(self, leave: Callable[[int], object]) -> None:
        """Close all regions that nobody holds or owns a group of.

        Parameters
        ----------
        leave
            Closes the files that a region's groups lie in, by its first group; before anybody may
            get these numbers, and once more where an interrupt came in between.
        """
        idle = [region for region in self._regions if not region.in_use and not region.holds]
        for region in idle:
            leave(region.first)
            self._regions.remove(region)
            self._free = [*self._free, *range(region.first, region.first + region.count)]
            heapq.heapify(self._free)

    def _region_of(self, group: int) -> _Region | None:
        at = bisect_right(self._regions, _Region(group, 0)) - 1
        if at < 0:
            return None
        region = self._regions[at]
        return region if group < region.first + region.count else None

    def _run(self, count: int) -> int:
        """Return where so many free groups lie in a row, the last of them maybe new ones."""
        first, length = 0, 0
        for group in sorted(self._free):
            if length and group == first + length:
                length += 1
            else:
                first, length = group, 1
            if length == count:
                return first
        return first if length and first + length == len(self._owners) else len(self._owners)


# --- Where groups lie ---

# Number of the file that is the cold pool's own.
OWN_FILE = -1


@dataclass(frozen=True)
class PlacedGroups:
    """Those of some groups of a layer that lie in one file.

    Parameters
    ----------
    chosen
        bool, a flag for each group; None where all of them do.
    file
        Number of the file, or `OWN_FILE`.
    starts
        int64, by group number: the byte of the file that each group starts at; None in the own
        file, where they lie in the order of their numbers.
    """

    chosen: NDArray[np.bool_] | None
    file: int
    starts: NDArray[np.int64] | None


class Placement:
    """In which file each group of a cold pool lies, and at which byte, layer by layer.

    A group lies in the cold pool's own file of its layer until it is placed elsewhere. Any thread
    may look while another places groups that nobody looks for. Where nothing ever lay elsewhere
    there are no tables.
    """

    def __init__(self, layers: int) -> None:
        # Number of the file and byte of it, (layers, groups); they grow by being replaced.
        self._files = np.zeros((layers, 0), np.int32)
        self._starts = np.zeros((layers, 0), np.int64)
        self._changing = threading.Lock()

    def place(
        self, layers: slice, groups: NDArray[np.int64], file: int, starts: NDArray[np.int64]
    ) -> None:
        """Let groups of some layers lie in a file, each at a byte of it.

        Parameters
        ----------
        layers, groups
            Whose; int64, one at least.
        starts
            int64 (layers, groups), bytes.
        """
        with self._changing:
            self._cover(int(groups.max()) + 1)
            # Who sees the file sees where in it.
            self._starts[layers, groups] = starts
            self._files[layers, groups] = file

    def forget(self, layers: slice, groups: NDArray[np.int64]) -> None:
        """Let groups of some layers lie in the own files again."""
        if self._files.shape[1]:
            with self._changing:
                self._files[layers, groups[groups < self._files.shape[1]]] = OWN_FILE

    def of(self, layer: int, groups: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of the file that each group lies in, int32."""
        files = self._files[layer]
        found = np.full(len(groups), OWN_FILE, np.int32)
        known = groups < len(files)
        found[known] = files[groups[known]]
        return found

    def parts(self, layer: int, groups: NDArray[np.int64]) -> Iterator[PlacedGroups]:
        """Yield the files that some groups of a layer lie in, and which do."""
        if not self._files.shape[1]:
            yield PlacedGroups(None, OWN_FILE, None)
            return
        files = self.of(layer, groups)
        # Behind the files: a table that is held has all groups that lie elsewhere now.
        starts = self._starts[layer]
        for file in sorted(set(files.tolist())):
            chosen = files == file
            yield PlacedGroups(
                None if chosen.all() else chosen, file, None if file == OWN_FILE else starts
            )

    def starts(self, layer: int, groups: NDArray[np.int64], stride: int) -> NDArray[np.int64]:
        """Return the byte of its file that each group of `stride` bytes starts at, int64."""
        starts = groups * stride
        for part in self.parts(layer, groups):
            if part.starts is not None:
                chosen = slice(None) if part.chosen is None else part.chosen
                starts[chosen] = part.starts[groups[chosen]]
        return starts

    def _cover(self, groups: int) -> None:
        layers, known = self._files.shape
        if groups > known:
            room = max(groups, 2 * known)
            files = np.full((layers, room), OWN_FILE, np.int32)
            starts = np.zeros((layers, room), np.int64)
            files[:, :known], starts[:, :known] = self._files, self._starts
            # Who sees the new files sees the new starts.
            self._starts = starts
            self._files = files


@dataclass(frozen=True)
class WrittenElsewhere:
    """Groups of one write that went to another file than the cold pool's own.

    Parameters
    ----------
    first, stop
        Which of the groups of the write.
    file
        Number of the file, as `OtherFiles.add_file` gave it.
    start
        The byte that the first of them starts at; the others follow.
    """

    first: int
    stop: int
    file: int
    start: int


# Writes rows of whole groups elsewhere, page-aligned uint8 (64 · groups, row_bytes), in the writing
# thread; what it does not tell of goes to the own file.
WriteElsewhere = Callable[[NDArray[np.uint8]], list[WrittenElsewhere]]


class FileSeals(Protocol):
    """What opens the pages of groups that lie in files of others."""

    @property
    def seals(self) -> Seals:
        """What the native library opens pages with, group by group."""

    def open(self, file: ReadFile, group: int, start: int, piece: memoryview, offset: int) -> None:
        """Open whole pages in their place, or raise the file's error.

        Parameters
        ----------
        file
            Where they were read.
        group, start
            The first of some groups one behind the other, and where in the file it begins.
        piece, offset
            The pages, and where in the file they begin.
        """


class OtherFiles:
    """The files that groups of a cold pool lie in beside its own, and which lie where."""

    def __init__(self, layers: int, group_bytes: int) -> None:
        self.placement = Placement(layers)
        self._layers, self._group_bytes = layers, group_bytes
        self._files: dict[int, tuple[Sequence[ReadFile], IOMode]] = {}
        self._seals: dict[int, FileSeals] = {}
        # Of each base, by its first group, its number as a file.
        self._bases: dict[int, tuple[int, RowBase]] = {}
        self._numbers = count()

    @property
    def io_modes(self) -> set[IOMode]:
        """How they are read."""
        # A copy first: whoever asks for statistics does not wait for who opens files meanwhile.
        return {mode for _, mode in tuple(self._files.values())}

    @property
    def are_used(self) -> bool:
        """Whether any groups may lie in them."""
        return bool(self._files)

    def in_base(self, groups: NDArray[np.int64]) -> bool:
        """Say whether any of some groups lie in a base."""
        return any(
            ((groups >= first) & (groups < first + base.count)).any()
            for first, (_, base) in self._bases.items()
        )

    def file(self, layer: int, number: int) -> ReadFile:
        """Return a file of a layer by its number."""
        return self._files[number][0][layer]

    def seals(self, number: int) -> Seals | None:
        """Return what opens the pages of a file while rows land, None where they are plain."""
        return self._seals[number].seals if number in self._seals else None

    def open(
        self, layer: int, number: int, group: int, start: int, piece: memoryview, offset: int
    ) -> None:
        """Open pages of a file where they are sealed; parameters as of `FileSeals`."""
        if number in self._seals:
            self._seals[number].open(self.file(layer, number), group, start, piece, offset)

    def add_file(self, file: ReadFile, mode: IOMode, seals: FileSeals | None = None) -> int:
        """Return a number for a file that groups of all layers may lie in; its owner closes it."""
        number = next(self._numbers)
        if seals is not None:
            self._seals[number] = seals
        self._files[number] = [file] * self._layers, mode
        return number

    def place(self, layer: int, groups: NDArray[np.int64], file: int, start: int) -> None:
        """Let groups of a layer lie one behind the other in a file, from some byte on."""
        places = start + np.arange(len(groups)) * self._group_bytes
        self.placement.place(slice(layer, layer + 1), groups, file, places[None])

    def place_in_all(self, groups: NDArray[np.int64], file: int, starts: NDArray[np.int64]) -> None:
        """Let groups of all layers lie in a file, each at a byte of it, int64 (layers, groups)."""
        self.placement.place(slice(None), groups, file, starts)

    def leave(self, groups: Iterable[int]) -> None:
        """Let groups that nobody owns lie in the own files again, for who writes them next."""
        self.placement.forget(slice(None), np.fromiter(groups, np.int64))

    # --- bases -----------------------------------------------------------------------------

    def base_like(self, base: RowBase) -> int | None:
        """Return where a base of the same files begins that has as many groups, or None."""
        return begins_like(base, {first: own for first, (_, own) in self._bases.items()})

    def add_base(self, first: int, base: RowBase) -> None:
        """Let groups from `first` on lie in a base, which is closed with this."""
        number = next(self._numbers)
        groups = np.arange(first, first + base.count)
        try:
            self._files[number] = base.files, base.io_mode
            if base.count:
                starts = np.tile((groups - first) * self._group_bytes, (self._layers, 1))
                self.place_in_all(groups, number, starts)
            self._bases[first] = number, base
        except BaseException:
            # Ctrl-C: whoever gave them closes them.
            self.leave(groups)
            self._files.pop(number, None)
            raise

    def drop_base(self, first: int) -> None:
        """Close the base whose groups begin with `first`, if there is one."""
        if first in self._bases:
            number, base = self._bases[first]
            self.leave(range(first, first + base.count))
            self._files.pop(number, None)
            base.close()
            # Last: after an interrupt before that it is dropped once more.
            del self._bases[first]

    def close(self) -> None:
        """Close all bases."""
        for _, base in self._bases.values():
            base.close()
