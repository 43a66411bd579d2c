# SPDX-License-Identifier: Apache-2.0
"""Values that are kept by their keys as far as memory goes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class KeptValues(Generic[_Key, _Value]):
    """Values whose bytes are bounded; those that were used longest ago go first.

    Any thread may use it.

    Parameters
    ----------
    most_bytes
        What they may take.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()

    def get(self, keys: Sequence[_Key]) -> list[_Value | None]:
        """Return the values of some keys, None where one is not kept."""
        found: list[_Value | None] = []
        with self._lock:
            for key in keys:
                own = self._values.get(key)
                if own is not None:
                    self._values.move_to_end(key)
                found.append(None if own is None else own[0])
        return found

    def keep(self, values: Iterable[tuple[_Key, _Value, int]]) -> None:
        """Keep values by their keys, which take so many bytes each; one that is kept stays."""
        with self._lock:
            for key, value, byte_count in values:
                if key not in self._values:
                    self._bytes += byte_count
                    self._values[key] = value, byte_count
            while self._bytes > self._most_bytes:
                _, (_, gone) = self._values.popitem(last=False)
                self._bytes -= gone

    def clear(self) -> None:
        """Keep none any more."""
        with self._lock:
            self._values.clear()
            self._bytes = 0
