# SPDX-License-Identifier: Apache-2.0
"""A choice of tokens that a thread of the native library makes while a layer computes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.engine.selection import explained
from hillinfer.native.library import NativeLibrary
from hillinfer.shadow.segments import SegmentLayer
from hillinfer_model.errors import NonFiniteQueryError


class ChoiceAhead:
    """Tokens that are being chosen, until someone asks for them.

    Nothing of it takes Python's global lock before that.

    Parameters
    ----------
    library
        Chooses.
    layer
        Whose tokens.
    positions
        int64, contiguous: becomes what is chosen.
    own, words
        The layer's last segment, and the descriptors whose last word becomes its coded tokens.
    held
        What else the library looks at until it has chosen.
    """

    def __init__(
        self,
        library: NativeLibrary,
        layer: int,
        positions: NDArray[np.int64],
        own: SegmentLayer,
        words: Any,
        held: object,
    ) -> None:
        self._library = library
        self._layer = layer
        self._positions = positions
        self._own = own
        self._words = words
        self._held = held
        self._handle: int | None = None

    def begin(self, variant: int, table: int, step: int) -> None:
        """Begin to choose; `positions` or `drop` must follow.

        Parameters
        ----------
        variant
            Number of the instruction set.
        table, step
            Addresses of what the library is told; they may change afterwards.
        """
        self._handle = self._library.begin_choice(variant, table, step, self._positions.ctypes.data)

    def positions(self) -> NDArray[np.int64]:
        """Return what is chosen, once it is.

        Raises
        ------
        CacheUseError
            Where the query was not finite.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                self._library.end_choice(handle)
            except NonFiniteQueryError as error:
                raise explained(self._layer, error) from error
            finally:
                self._own.coded_tokens = self._words[-1]
        return self._positions

    def drop(self) -> None:
        """Wait until nothing is under way; what is chosen, or what went wrong, is forgotten."""
        with suppress(Exception):
            self.positions()
