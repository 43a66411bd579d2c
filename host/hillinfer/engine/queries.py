# SPDX-License-Identifier: Apache-2.0
"""Queries as they are scored, and a choice by one that another thread makes meanwhile."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.errors import CacheUseError
from hillinfer.kv.sequence import Sequence
from hillinfer.native.library import NativeLibrary
from hillinfer.shadow.segments import SegmentLayer
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS


class Explained:
    """Says what to do about a query that cannot be scored.

    A class, because a generator takes several times as long at every layer and step.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the reason in words that help."""
        if isinstance(error, NonFiniteQueryError):
            raise explained(self._layer, error) from error


def explained(layer: int, error: NonFiniteQueryError) -> CacheUseError:
    """Return an error that says what to do about a query that cannot be scored."""
    return CacheUseError(
        f"layer {layer} made a query that is not finite ({error}): the model's weights or its "
        "number type are at fault; try --dtype float32 (the rows that the drive returned are "
        "those that were written)"
    )


def shadow_states(states: torch.Tensor) -> torch.Tensor:
    """Return keys or values (kv_heads, tokens, head_dim) token by token in FP16, to be coded."""
    moved = states.transpose(0, 1)
    if moved.dtype is torch.float16 and moved.is_cpu:
        return moved
    return moved.to(device="cpu", dtype=torch.float16)


def host_query(query: torch.Tensor) -> torch.Tensor:
    """Return a query (query_heads, 1, head_dim) as it is scored with, on the processor."""
    own = query[:, 0]
    return own if own.dtype is torch.float32 and own.is_cpu else own.float().cpu()


def may_choose_aside(past: int, segment_tokens: int) -> bool:
    """Say whether what another thread looks at stays as it is until the layer's turn.

    It does where no segment of the sequence begins or becomes full with the token that comes behind
    `past` others, and its group goes on.
    """
    inside = past % segment_tokens
    return past % GROUP_TOKENS != 0 and 0 < inside < segment_tokens - 1


class ChoiceAhead:
    """Tokens that are being chosen, until someone asks for them.

    Nothing of it takes Python's global lock before that.

    Parameters
    ----------
    library
        Chooses.
    layer, sequence
        Whose tokens.
    sets
        int64 (sets, tokens), contiguous: becomes what is chosen.
    exact
        Likewise of exact tokens, where others are coded; else None.
    own
        The layer's last segment, which learns how many of its tokens are coded.
    held
        What else the library looks at until it has chosen.
    """

    def __init__(
        self,
        library: NativeLibrary,
        layer: int,
        sequence: Sequence,
        sets: NDArray[np.int64],
        exact: NDArray[np.int64] | None,
        own: SegmentLayer,
        held: object,
    ) -> None:
        self._library = library
        self._layer = layer
        self._sequence = sequence
        self._sets = sets
        self._exact = exact
        self._own = own
        self._held = held
        self._handle: int | None = None

    def begin(self, variant: int, step: int) -> None:
        """Begin to choose; `chosen` or `drop` must follow.

        Parameters
        ----------
        variant
            Number of the instruction set.
        step
            Address of what the library is asked; it may change afterwards.
        """
        table = self._sequence.table_addresses[self._layer]
        exact = None if self._exact is None else self._exact.ctypes.data
        sets = self._sets.ctypes.data, exact
        self._handle = self._library.begin_choice(variant, table, step, *sets)

    def chosen(self) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]] | None]:
        """Return the sets that are chosen, once they are, and their exact tokens or None.

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
                self._own.coded_tokens = self._sequence.tables.coded[self._layer]
        return list(self._sets), None if self._exact is None else list(self._exact)

    def drop(self) -> None:
        """Wait until nothing is under way; what is chosen, or what went wrong, is forgotten."""
        with suppress(Exception):
            self.chosen()
