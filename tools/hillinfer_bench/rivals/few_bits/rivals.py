# SPDX-License-Identifier: Apache-2.0
"""Rivals that attend to codes of all tokens: in memory, and streamed from the drive."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.engine_table import open_engine
from hillinfer_bench.frontier.four_bit import RESIDUAL, code_bits
from hillinfer_bench.rivals.drive_rows import BlockStream, DriveRows
from hillinfer_bench.rivals.few_bits.codes import Newest, UnitForm, coded_attention
from hillinfer_bench.rivals.rival import Rival, RivalSetup, Traffic

# What is read from memory for the newest tokens is one part in hundreds, and not counted.
_STORED_BITS = 16


@dataclass(frozen=True)
class Piece:
    """Some units of a sequence.

    Parameters
    ----------
    first
        The first one's first token.
    units
        Contiguous uint8 (units, bytes of a unit).
    is_last
        Whether the newest tokens come next.
    """

    first: int
    units: NDArray[np.uint8]
    is_last: bool = False


class FewBits(Rival):
    """Keys and values of all tokens as codes, but for the newest 128, after KIVI.

    Keys are coded per channel in groups of 32 tokens, 128 tokens at once when the next one comes;
    values per token in groups of 32 channels, one token at a time when it is the 129th. What is
    not coded lies in memory as float32, so that nothing is widened again.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    bits: ClassVar[int]
    """Of a code."""

    def __init__(self, setup: RivalSetup) -> None:
        super().__init__(setup)
        self.form = self.unit_form()
        self.attention = coded_attention(self.form, setup.form)
        shape = setup.shape
        size = (shape.layers, setup.batch, 2, shape.kv_heads, RESIDUAL, shape.head_dim)
        rows = self.meter.array(size, np.float32)
        self._newest = [[Newest(*own) for own in of_layer] for of_layer in rows]

    @abstractmethod
    def unit_form(self) -> UnitForm:
        """Return how codes lie."""

    @abstractmethod
    def open_unit(self, layer: int, row: int, token: int) -> NDArray[np.uint8]:
        """Return the unit that a token is coded into, uint8 (bytes of a unit)."""

    @abstractmethod
    def pieces(self, layer: int, row: int) -> Iterator[Piece]:
        """Yield all codes of a sequence in order, each valid until the next."""

    def coded(self, layer: int, row: int) -> None:
        """Learn that a sequence grew and its codes are made; nothing, as a rule."""

    def attended_token_bytes(self) -> float:
        """Return those of codes; see `Rival`."""
        return float(self.setup.shape.layers * self.form.token_bytes)

    def describe(self) -> str:
        """Return the bits of a code, and what attends."""
        return f"{self.bits} bits, {self.attention.name}"

    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take rows, and code those that are no longer among the newest; see `Rival`."""
        start = self.grow(layer, row, keys, values)
        newest = self._newest[layer][row]
        given = [np.ascontiguousarray(part.float().numpy()) for part in (keys, values)]
        at, end = start, start + keys.shape[1]
        while at < end:
            place = at % RESIDUAL
            stop = min(end, at - place + RESIDUAL)
            if at and place == 0:
                unit = self.open_unit(layer, row, at - RESIDUAL)
                self.attention.code_keys(unit, (at - RESIDUAL) % self.form.tokens, newest)
            if at >= RESIDUAL:
                old = at - RESIDUAL
                unit = self.open_unit(layer, row, old)
                first = old % self.form.tokens
                self.attention.code_values(unit, first, newest, place, stop - at)
            own = slice(place, place + stop - at)
            for rows, part in zip((newest.keys, newest.values), given, strict=True):
                rows[:, own] = part[:, at - start : stop - start]
            at = newest.length = stop
            self.coded(layer, row)

    def append(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take one token; see `Rival`."""
        self.fill(layer, row, keys, values)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to everything; see `Rival`."""
        newest = self._newest[layer][row]
        scaled = np.ascontiguousarray((query[:, 0].float() * scaling).numpy())
        sums = self.attention.begin(scaled)
        for piece in self.pieces(layer, row):
            self.attention.add(
                sums, scaled, piece.units, piece.first, newest, is_last=piece.is_last
            )
        out = torch.from_numpy(sums[:, 2:] / sums[:, 1:2])
        return out[:, None].to(query.dtype)

    def close(self) -> None:
        """Give the memory back."""
        self.meter.release(self.meter.traffic().dram_bytes)
        self._newest = []

    def newest(self, layer: int, row: int) -> Newest:
        """Return a sequence's newest tokens, and how many there are of all."""
        return self._newest[layer][row]


class FewBitsMemory(FewBits):
    """All codes in memory; M0 does not bound it.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    bounded: ClassVar[bool] = False

    def __init__(self, setup: RivalSetup) -> None:
        super().__init__(setup)
        units = -(-setup.context // self.form.tokens)
        size = (setup.shape.layers, setup.batch, units, self.form.byte_count)
        self._units = self.meter.buffer(int(np.prod(size))).reshape(size)

    @classmethod
    def memory_share(cls) -> float:
        """Return the codes over rows, the newest tokens apart; see `Rival`."""
        return code_bits(cls.bits) / _STORED_BITS

    def unit_form(self) -> UnitForm:
        """Return that of 128 tokens; see `FewBits`."""
        return UnitForm(self.setup.shape, self.bits)

    def open_unit(self, layer: int, row: int, token: int) -> NDArray[np.uint8]:
        """Return the token's own; see `FewBits`."""
        own: NDArray[np.uint8] = self._units[layer, row, token // self.form.tokens]
        return own

    def pieces(self, layer: int, row: int) -> Iterator[Piece]:
        """Yield all at once; see `FewBits`."""
        count = -(-self.newest(layer, row).coded_keys // self.form.tokens)
        yield Piece(0, self._units[layer, row, :count], is_last=True)

    def close(self) -> None:
        """Give the memory back."""
        super().close()
        self._units = np.empty((0, 0, 0, 0), np.uint8)


class FewBitsDrive(FewBits):
    """A fixed share of each layer's codes in DRAM, the rest streamed, as `FullDrive` does.

    The first tokens are the share. A unit is written once, when all of it is coded; the one that
    is not lies in memory.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    def __init__(self, setup: RivalSetup) -> None:
        super().__init__(setup)
        form, shape = self.form, setup.shape
        size = (shape.layers, setup.batch, form.byte_count)
        self._open = self.meter.buffer(int(np.prod(size))).reshape(size)
        self.spilled = [[0] * setup.batch for _ in range(shape.layers)]
        self.engine = open_engine(setup.io, setup.threads, setup.calls)
        try:
            given = setup, form.token_bytes, "codes", self.engine, self.meter
            self.rows = DriveRows(*given, group_rows=form.tokens)
        except BaseException:
            self.engine.close()
            raise
        try:
            self.stream = BlockStream(setup, self.rows, self.spilled, self.meter, form.tokens)
            most = self.rows.region_rows // form.tokens
            held = min(most, self.meter.free_bytes // (setup.units * form.byte_count))
            self.stream.first_token = self.held_tokens = held * form.tokens
            memory = self.meter.buffer(setup.units * held * form.byte_count)
            self._held = memory.reshape(shape.layers, setup.batch, held, form.byte_count)
        except BaseException:
            self._close_drive()
            raise

    def unit_form(self) -> UnitForm:
        """Return that of whole pages; see `FewBits`."""
        return UnitForm.of_whole_pages(self.setup.shape, self.bits)

    def describe(self) -> str:
        """Return the bits, what attends, the share in DRAM and the size of a block."""
        return (
            f"{super().describe()}, {self.held_tokens} tokens in DRAM, blocks of "
            f"{self.stream.block_tokens}"
        )

    def open_unit(self, layer: int, row: int, token: int) -> NDArray[np.uint8]:
        """Return the one in memory: of any other all tokens are coded; see `FewBits`."""
        own: NDArray[np.uint8] = self._open[layer, row]
        return own

    def coded(self, layer: int, row: int) -> None:
        """Write the open unit where all of it is coded; see `FewBits`."""
        first = self.spilled[layer][row]
        if self.newest(layer, row).coded_values < first + self.form.tokens:
            return
        unit = self._open[layer, row]
        if first < self.held_tokens:
            self._held[layer, row, first // self.form.tokens] = unit
        else:
            self.rows.write(layer, row, first, unit)
        self.spilled[layer][row] += self.form.tokens

    def pieces(self, layer: int, row: int) -> Iterator[Piece]:
        """Yield the share, then what is streamed, then the open unit; see `FewBits`."""
        form, spilled = self.form, self.spilled[layer][row]
        held = min(spilled, self.held_tokens)
        if held:
            yield Piece(0, self._held[layer, row, : held // form.tokens])
        at = held
        for rows in self.stream.blocks(layer, row):
            yield Piece(at, rows.reshape(-1, form.byte_count))
            at += len(rows)
        coded = self.newest(layer, row).coded_keys
        yield Piece(spilled, self._open[layer, row][None][: int(coded > spilled)], is_last=True)

    def traffic(self) -> Traffic:
        """Return the totals, a block being read ahead included; see `Rival`."""
        self.stream.wait()
        return super().traffic()

    def close(self) -> None:
        """Wait for what is being read and give everything back; see `Rival`."""
        self.stream.close()
        self._close_drive()
        super().close()
        self._open = np.empty((0, 0, 0), np.uint8)
        self._held = np.empty((0, 0, 0, 0), np.uint8)

    def _close_drive(self) -> None:
        self.engine.close()
        self.rows.close()


class FourBitMemory(FewBitsMemory):
    """Codes of 4 bits in memory; see `FewBitsMemory`."""

    bits = 4


class FiveBitMemory(FewBitsMemory):
    """Codes of 5 bits in memory; see `FewBitsMemory`."""

    bits = 5


class FourBitDrive(FewBitsDrive):
    """Codes of 4 bits on the drive; see `FewBitsDrive`."""

    bits = 4


class FiveBitDrive(FewBitsDrive):
    """Codes of 5 bits on the drive; see `FewBitsDrive`."""

    bits = 5
