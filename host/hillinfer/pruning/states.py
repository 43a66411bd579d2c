# SPDX-License-Identifier: Apache-2.0
"""Boundary states: hidden states that wait at the first cut, in memory or on the drive.

They are what enters the first layer that sees fewer tokens, of every token, so that whichever stay
can go on from there. Pieces of them never change, so forks of a cache share them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
        Called once nobody has them any more; None where nobody counts their memory.
    whole
        What these are a part of, whose memory is counted as long as they are there; None for none.
    """

    def __init__(
        self,
        states: torch.Tensor,
        released: Callable[[], None] | None = None,
        whole: States | None = None,
    ) -> None:
        self._states, self._whole = states, whole
        self.tokens, self.byte_count = states.shape[1], states.nbytes
        if released is not None:
            weakref.finalize(self, released).atexit = False

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Return the states of some of the tokens."""
        return self._states[:, places.to(self._states.device)]

    def first(self, tokens: int) -> States:
        """Return those of the first tokens, in the same memory."""
        return StatesInMemory(self._states[:, :tokens], whole=self)


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
        like = torch.empty_like(states, device="meta")
        expected, tokens = _sum(memory), states.shape[1]
        return _StatesOnDrive(self, offset, like, states.device, expected, tokens)

    def read(self, offset: int, byte_count: int, expected: int) -> NDArray[np.uint8]:
        """Return bytes that were written; ColdPoolError where others come back."""
        memory = _pages(byte_count)
        self._file.read(memory.data, offset)
        if _sum(memory) != expected:
            raise self._file.changed(memory.nbytes, offset)
        return memory[:byte_count]


@dataclass(frozen=True, eq=False)
class _StatesOnDrive(States):
    """States in a file.

    Parameters
    ----------
    file, offset
        Where they lie.
    like
        Of the same shape and type and for the same device, without memory of its own.
    device
        Where the model wants them.
    expected
        Their checksum.
    tokens
        How many of the first ones these are.
    """

    file: StatesFile
    offset: int
    like: torch.Tensor
    device: torch.device
    expected: int
    tokens: int

    @property
    def byte_count(self) -> int:  # type: ignore[override]
        """What they take."""
        return self.like.nbytes // self.like.shape[1] * self.tokens

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Read all of them and return the states of some of the tokens."""
        content = self.file.read(self.offset, self.like.nbytes, self.expected)
        states = torch.from_numpy(content).view(self.like.dtype).view(self.like.shape)
        return states[:, places.cpu()].to(self.device)

    def first(self, tokens: int) -> States:
        """Return those of the first tokens, which lie where they lay."""
        return replace(self, tokens=tokens)


@dataclass(frozen=True)
class ChosenStates:
    """States of some of the tokens that wait, of which only a part need be in memory at a time.

    Parameters
    ----------
    pieces
        Of all that wait, in the order of tokens.
    places
        int64, ascending, which of them.
    """

    pieces: Sequence[States]
    places: torch.Tensor

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return those of the chosen tokens from start <= i < stop, (batch, tokens, hidden_size).

        Raises ColdPoolError where they cannot be read back.
        """
        return gathered_states(self.pieces, self.places[start:stop])


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


@dataclass(frozen=True)
class Boundary:
    """The boundary states of a cache's tokens.

    Parameters
    ----------
    brought
        How many first tokens have none, because the cache began with their rows.
    pieces
        Of the tokens behind these, in their order.
    file
        Where what comes is written; None before it is, and where states stay in memory.
    """

    brought: int = 0
    pieces: tuple[States, ...] = ()
    file: StatesFile | None = None

    @property
    def tokens(self) -> int:
        """Up to which token states are there, or are not needed."""
        return self.brought + sum(one.tokens for one in self.pieces)

    @property
    def byte_count(self) -> int:
        """What all of them take."""
        return sum(one.byte_count for one in self.pieces)

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Return those of some tokens, int64 ascending, as (batch, positions, hidden_size).

        Raises ColdPoolError where they cannot be read back.
        """
        return gathered_states(self.pieces, positions - self.brought)

    def behind(self, piece: States) -> Boundary:
        """Return them with those of the tokens that come next."""
        return replace(self, pieces=(*self.pieces, piece))

    def first(self, tokens: int) -> Boundary:
        """Return those of the first tokens."""
        left: list[States] = []
        missing = tokens - self.brought
        for piece in self.pieces:
            if 0 < missing < piece.tokens:
                left.append(piece.first(missing))
            elif missing > 0:
                left.append(piece)
            missing -= piece.tokens
        return replace(self, brought=min(self.brought, tokens), pieces=tuple(left))

    def forgotten(self) -> Boundary:
        """Return none of them."""
        return Boundary(self.brought)


# --- keys that decide ---


class DecidingKeys:
    """Keys of the layer before a cut, which rank blocks, of all tokens in counted memory.

    Parameters
    ----------
    shape
        Tokens, KV heads, head size.
    stored_type
        Theirs.
    released
        Called once, when nobody needs them.

    Attributes
    ----------
    keys
        (kv_heads, tokens, head_dim); those of the first `done` tokens are there.
    done
        How many first tokens have come.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        stored_type: torch.dtype,
        released: Callable[[], None],
    ) -> None:
        keys = torch.empty(shape, dtype=stored_type)
        self.keys, self.done = keys.transpose(0, 1), 0
        self._bytes = keys.view(shape[0], -1).view(torch.uint8).numpy()
        self._release = weakref.finalize(self, released)
        self._release.atexit = False

    def take(self, addresses: NDArray[np.uint64]) -> None:
        """Take the keys of the next rows, whose first bytes they are.

        Natively: copies of each block by torch would wake its threads, which took several times as
        long as all else.

        Parameters
        ----------
        addresses
            uint64, where the rows lie.
        """
        self.done += native_library().copy_rows(addresses, self._bytes[self.done :])

    def release(self) -> None:
        """Say that nobody needs them; harmless when done twice."""
        self._release()


def _pages(byte_count: int) -> NDArray[np.uint8]:
    size = round_up(byte_count, PAGE_BYTES)
    return aligned_buffer(size)[:size]


def _sum(memory: NDArray[np.uint8]) -> int:
    return int(native_library().crc32c(memory.reshape(1, -1), np.zeros(1, np.uint32))[0])
