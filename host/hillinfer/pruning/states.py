# SPDX-License-Identifier: Apache-2.0
"""Boundary states: hidden states that wait at the first cut, in memory or on the drive.

They are what enters the first layer that sees fewer tokens, of every token, so that whichever stay
can go on from there. Pieces of them never change, so forks of a cache share them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer, round_up
from hillinfer.memory_budget import Accountant, Part
from hillinfer.native.library import native_library

# Of the memory that states go through on their way to the drive and back; more where those of one
# token are more.
BUFFER_BYTES = 256 << 10


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
    """The states of documents on the drive, written once, one behind the other.

    They go in pieces of whole tokens, each with a checksum, through one buffer of counted memory.

    Parameters
    ----------
    file
        Empty; closed once nobody has any of the states.
    accountant
        Counts the buffer for as long as it is there.
    """

    def __init__(self, file: ColdFile, accountant: Accountant) -> None:
        self._file, self._accountant, self._end = file, accountant, 0
        weakref.finalize(self, file.close)

    def add(self, states: torch.Tensor) -> States:
        """Write states (batch, tokens, hidden_size) and return them.

        Raises ColdPoolError where the drive fails, BudgetError where there is no room to do it.
        """
        content = states.detach().cpu().contiguous().view(-1, states.shape[2])
        rows = content.view(torch.uint8).numpy()
        pieces, offset, expected = _Pieces(*rows.shape), self._end, []
        with self._buffer(pieces) as memory:
            for number in range(len(pieces)):
                part = rows[pieces.inside(number)].reshape(-1)
                page = memory[: round_up(part.nbytes, PAGE_BYTES)]
                page[: part.nbytes], page[part.nbytes :] = part, 0
                self._file.write(page.data, offset + number * pieces.stride)
                expected.append(_sum(page))
        # What fails before is written over by what comes next.
        self._end = offset + len(pieces) * pieces.stride
        like = torch.empty_like(states, device="meta")
        return _StatesOnDrive(
            self, offset, like, states.device, tuple(expected), tokens=states.shape[1]
        )

    def read(
        self,
        offset: int,
        shape: tuple[int, int],
        wanted: NDArray[np.int64],
        expected: Sequence[int],
    ) -> NDArray[np.uint8]:
        """Return some rows of what was written at once, uint8 (wanted, bytes of a row).

        Parameters
        ----------
        offset, shape
            Where they lie; how many they are, and bytes of each.
        wanted
            Which of them.
        expected
            Checksums of all pieces.

        Raises
        ------
        ColdPoolError
            Where others come back.
        BudgetError
            Where there is no room to read them.
        """
        pieces, found = _Pieces(*shape), np.empty((len(wanted), shape[1]), np.uint8)
        numbers = wanted // pieces.rows_each
        with self._buffer(pieces) as memory:
            for number in np.unique(numbers).tolist():
                inside, places = pieces.inside(number), numbers == number
                byte_count = (inside.stop - inside.start) * shape[1]
                page, start = memory[: round_up(byte_count, PAGE_BYTES)], offset
                start += number * pieces.stride
                self._file.read(page.data, start)
                if _sum(page) != expected[number]:
                    raise self._file.changed(page.nbytes, start)
                rows = page[:byte_count].reshape(-1, shape[1])
                found[places] = rows[wanted[places] - inside.start]
        return found

    @contextmanager
    def _buffer(self, pieces: _Pieces) -> Iterator[NDArray[np.uint8]]:
        """Give page-aligned memory for one piece, counted while it is there."""
        size = pieces.stride
        self._accountant.take(Part.STAGING, size)
        try:
            yield aligned_buffer(size)[:size]
        finally:
            self._accountant.give(Part.STAGING, size)


@dataclass(frozen=True)
class _Pieces:
    """Rows that are written and read some at a time, each piece from the start of a page.

    Parameters
    ----------
    rows, row_bytes
        How many, and of how many bytes each.
    """

    rows: int
    row_bytes: int

    @property
    def rows_each(self) -> int:
        """How many rows a piece has; the last one may have fewer."""
        return min(max(1, BUFFER_BYTES // self.row_bytes), self.rows)

    @property
    def stride(self) -> int:
        """Bytes from the start of a piece to that of the next one."""
        return round_up(self.rows_each * self.row_bytes, PAGE_BYTES)

    def __len__(self) -> int:
        """Return how many pieces there are."""
        return -(-self.rows // self.rows_each)

    def inside(self, number: int) -> slice:
        """Return which rows a piece has."""
        return slice(number * self.rows_each, min((number + 1) * self.rows_each, self.rows))


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
        Checksums of their pieces.
    tokens
        How many of the first ones these are.
    """

    file: StatesFile
    offset: int
    like: torch.Tensor
    device: torch.device
    expected: tuple[int, ...]
    tokens: int

    @property
    def byte_count(self) -> int:  # type: ignore[override]
        """What they take."""
        return self.like.nbytes // self.like.shape[1] * self.tokens

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Read the pieces that hold some of the tokens and return the states of these."""
        batch, tokens, hidden_size = self.like.shape
        shape = (batch * tokens, hidden_size * self.like.itemsize)
        wanted = (torch.arange(batch)[:, None] * tokens + places.cpu()).flatten().numpy()
        content = self.file.read(self.offset, shape, wanted, self.expected)
        states = torch.from_numpy(content).view(self.like.dtype)
        return states.view(batch, len(places), hidden_size).to(self.device)

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


def _sum(memory: NDArray[np.uint8]) -> int:
    return int(native_library().crc32c(memory.reshape(1, -1), np.zeros(1, np.uint32))[0])
