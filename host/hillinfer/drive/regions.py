# SPDX-License-Identifier: Apache-2.0
"""Which places of a store's files are in use, by how many owners, and which belong to a session."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from dataclasses import dataclass, field


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
    """

    def __init__(self) -> None:
        self._owners: list[int] = []
        # A heap.
        self._free: list[int] = []
        self._in_use = 0
        # By their first group.
        self._regions: list[_Region] = []

    @property
    def groups(self) -> int:
        """One more than the highest group number ever handed out or in a region."""
        return len(self._owners)

    @property
    def groups_in_use(self) -> int:
        """Groups that some sequence owns."""
        return self._in_use

    def take(self) -> int:
        """Return a group nobody owns, owned once from now on."""
        self._in_use += 1
        if self._free:
            group = heapq.heappop(self._free)
            self._owners[group] = 1
            return group
        self._owners.append(1)
        return len(self._owners) - 1

    def share(self, group: int) -> None:
        """Count one more owner; a group of a region may have had none."""
        if not self._owners[group]:
            region = self._region_of(group)
            if region is None:
                raise ValueError(f"nobody owns group {group}, which lies in no region")
            region.in_use += 1
            self._in_use += 1
        self._owners[group] += 1

    def give(self, group: int) -> bool:
        """Count one owner less and say whether nobody owns the group now."""
        self._owners[group] -= 1
        if self._owners[group]:
            return False
        self._in_use -= 1
        region = self._region_of(group)
        if region is None:
            heapq.heappush(self._free, group)
        else:
            region.in_use -= 1
        return True

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
        """Make the first `count` groups a region, which somebody owns."""
        self._free = sorted(group for group in self._free if group >= count)
        in_use = sum(owners > 0 for owners in self._owners[:count])
        insort(self._regions, _Region(0, count, in_use))

    def hold(self, first: int) -> None:
        """Keep the region that begins with a group open until `let_go`."""
        self._regions[bisect_right(self._regions, _Region(first, 0)) - 1].holds += 1

    def let_go(self, first: int) -> None:
        """Undo `hold`, or the hold of `open_region`."""
        self._regions[bisect_right(self._regions, _Region(first, 0)) - 1].holds -= 1

    def close_idle_regions(self) -> list[int]:
        """Close all regions that nobody holds or owns a group of; return the first groups."""
        idle = [region for region in self._regions if not region.in_use and not region.holds]
        for region in idle:
            self._regions.remove(region)
            self._free.extend(range(region.first, region.first + region.count))
        if idle:
            heapq.heapify(self._free)
        return [region.first for region in idle]

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
