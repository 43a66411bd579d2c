# SPDX-License-Identifier: Apache-2.0
"""Which groups of the cold pool are in use, and by how many sequences."""

from __future__ import annotations

import heapq


class GroupTable:
    """Hands out group numbers, lowest first, and counts who shares them."""

    def __init__(self) -> None:
        self._owners: list[int] = []
        self._free: list[int] = []

    @property
    def groups(self) -> int:
        """One more than the highest group number ever handed out."""
        return len(self._owners)

    @property
    def groups_in_use(self) -> int:
        """Groups that some sequence owns."""
        return len(self._owners) - len(self._free)

    def take(self) -> int:
        """Return a group nobody owns, owned once from now on."""
        if self._free:
            group = heapq.heappop(self._free)
            self._owners[group] = 1
            return group
        self._owners.append(1)
        return len(self._owners) - 1

    def share(self, group: int) -> None:
        """Count one more owner."""
        self._owners[group] += 1

    def give(self, group: int) -> bool:
        """Count one owner less and say whether the group is free now."""
        self._owners[group] -= 1
        if self._owners[group]:
            return False
        heapq.heappush(self._free, group)
        return True
