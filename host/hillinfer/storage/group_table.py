# SPDX-License-Identifier: Apache-2.0
"""Which groups of the cold pool are in use, and by how many sequences."""

from __future__ import annotations

import heapq


class GroupTable:
    """Hands out group numbers, lowest first, and counts who shares them.

    Groups below `fixed` lie in files that are never written again: they may be shared and given
    back, and nobody gets them to write to.
    """

    def __init__(self) -> None:
        self._owners: list[int] = []
        self._free: list[int] = []
        self._in_use = 0
        self.fixed = 0

    @property
    def groups(self) -> int:
        """One more than the highest group number ever handed out or fixed."""
        return len(self._owners)

    @property
    def groups_in_use(self) -> int:
        """Groups that some sequence owns."""
        return self._in_use

    def fix(self, groups: int) -> None:
        """Never hand out the groups below `groups` from now on, whoever owns them."""
        self._owners.extend([0] * (groups - len(self._owners)))
        self._free = [group for group in self._free if group >= groups]
        heapq.heapify(self._free)
        self.fixed = max(self.fixed, groups)

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
        """Count one more owner; a fixed group may have had none."""
        self._in_use += not self._owners[group]
        self._owners[group] += 1

    def give(self, group: int) -> bool:
        """Count one owner less and say whether nobody owns the group now."""
        self._owners[group] -= 1
        if self._owners[group]:
            return False
        self._in_use -= 1
        if group >= self.fixed:
            heapq.heappush(self._free, group)
        return True
