# SPDX-License-Identifier: Apache-2.0
"""Boundary states: hidden states that wait at the first cut, in memory or on the drive.

They are what enters the first layer that sees fewer tokens, of every token, so that whichever stay
can go on from there. Pieces of them never change, so forks of a cache share them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer, round_up
from hillinfer.native.library import native_library


class States(ABC):
    """The boundary states of tokens that came together.

    Attributes
    ----------
    tokens
        How many.
    byte_count
        What their states take.
    """

    tokens: int
    byte_count: int

    @abstractmethod
    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Return the states of some of the tokens, (batch, places, hidden_size).

        Parameters
        ----------
        places
            int64, which of them.

        Raises
        ------
        ColdPoolError
            Where they cannot be read back.
        """

    @abstractmethod
    def first(self, tokens: int) -> States:
        """Return those of the first tokens alone."""


class StatesInMemory(States):
    """States as the model made them.

    Parameters
    ----------
    states
        (batch, tokens, hidden_size).
    released
        Called once nobody has them any more.
    """

    def __init__(self, states: torch.Tensor, released: Callable[[], None] | None = None) -> None:
        self._states = states
        self.tokens, self.byte_count = states.shape[1], states.nbytes
        if released is not None:
            weakref.finalize(self, released).atexit = False

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Return the states of some of the tokens."""
        return self._states[:, places.to(self._states.device)]

    def first(self, tokens: int) -> States:
        """Return those of the first tokens; memory is counted as long as these are there."""
        part = StatesInMemory(self._states[:, :tokens])
        part._whole = self
        return part

    _whole: States | None = None


class StatesFile:
    """The states of one document on the drive, written once, one behind the other.

    Parameters
    ----------
    file
        Empty; closed once nobody has any of the states.
    """

    def __init__(self, file: ColdFile) -> None:
        self._file, self._end = file, 0
        weakref.finalize(self, file.close)

    def add(self, states: torch.Tensor) -> States:
        """Write states (batch, tokens, hidden_size) and return them; ColdPoolError on failure."""
        content = states.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        memory, offset = _pages(content.nbytes), self._end
        memory[: content.nbytes] = content
        memory[content.nbytes :] = 0
        self._file.write(memory.data, offset)
        # What fails before is written over by what comes next.
        self._end = offset + memory.nbytes
        return _StatesOnDrive(self, offset, states, _sum(memory), states.shape[1])

    def read(self, offset: int, byte_count: int, expected: int) -> NDArray[np.uint8]:
        """Return bytes that were written; ColdPoolError where others come back."""
        memory = _pages(byte_count)
        self._file.read(memory.data, offset)
        if _sum(memory) != expected:
            raise self._file.changed(memory.nbytes, offset)
        return memory[:byte_count]


class _StatesOnDrive(States):
    """States in a file; parameters say where, of what shape, and which checksum they have."""

    def __init__(
        self, file: StatesFile, offset: int, like: torch.Tensor, expected: int, tokens: int
    ) -> None:
        self._place = partial(file.read, offset, like.nbytes, expected)
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self.tokens = tokens
        self.byte_count = like.nbytes // like.shape[1] * tokens

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Read all of them and return the states of some of the tokens."""
        read = torch.from_numpy(self._place()).view(self._dtype).view(self._shape)
        return read[:, places.cpu()].to(self._device)

    def first(self, tokens: int) -> States:
        """Return those of the first tokens, which lie where they lay."""
        part = object.__new__(_StatesOnDrive)
        part.__dict__.update(self.__dict__)
        part.tokens, part.byte_count = tokens, self.byte_count // self.tokens * tokens
        return part


def first_states(pieces: Sequence[States], tokens: int) -> list[States]:
    """Return the states of the first tokens of a document.

    Parameters
    ----------
    pieces
        In the order of tokens.
    tokens
        How many stay.
    """
    left: list[States] = []
    for piece in pieces:
        if piece.tokens <= tokens:
            left.append(piece)
        elif tokens > 0:
            left.append(piece.first(tokens))
        tokens -= piece.tokens
    return left


def gathered_states(pieces: Sequence[States], positions: torch.Tensor) -> torch.Tensor:
    """Return the states of some tokens of a document, (batch, positions, hidden_size).

    Parameters
    ----------
    pieces
        In the order of tokens.
    positions
        int64, ascending.

    Raises
    ------
    ColdPoolError
        Where they cannot be read back.
    """
    found, start = [], 0
    for piece in pieces:
        inside = positions[(positions >= start) & (positions < start + piece.tokens)]
        if len(inside):
            found.append(piece.take(inside - start))
        start += piece.tokens
    return torch.cat(found, 1)


def _pages(byte_count: int) -> NDArray[np.uint8]:
    size = round_up(byte_count, PAGE_BYTES)
    return aligned_buffer(size)[:size]


def _sum(memory: NDArray[np.uint8]) -> int:
    return int(native_library().crc32c(memory.reshape(1, -1), np.zeros(1, np.uint32))[0])
