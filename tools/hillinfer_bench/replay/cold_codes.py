# SPDX-License-Identifier: Apache-2.0
"""Cold coded tokens read both ways: their 16-bit rows, or codes in a densely packed file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer, probe_io_mode, round_up
from hillinfer.drive.landing import MAX_READ_BYTES, FileRows
from hillinfer.drive.read_engines import ReadEngine
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.model_shape import ModelShape
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.scoring.coded import NativeValueCoder
from hillinfer.settings import IOChoice
from hillinfer_bench.replay.code_split import CodedTrace, SharedMemory, SplitReplay
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Reads bring rows that begin at multiples of it.
RECORD_ALIGNMENT = 64
_CURVE_SIZES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, MAX_READ_BYTES)
_CURVE_BYTES = 16 << 20
_PIECE_BYTES = 4 << 20
_TURNS = 3
_THREADS = 8
_CODED_TOKENS = 4096

# Row numbers by step, then by layer, int64 and ascending.
ColdRows = list[list[NDArray[np.int64]]]


# --- What is cold ---


class _Brought(SplitReplay):
    """Notes which coded tokens have neither codes nor a hot row."""

    def __init__(self, trace: CodedTrace, memory: SharedMemory, share: float) -> None:
        super().__init__(trace, memory.split(share))
        self.rows: ColdRows = []

    def _begin_step(self) -> None:
        super()._begin_step()
        self.rows.append([])

    def _bring(self, layer: int, rows: NDArray[np.int64]) -> None:
        self.rows[-1].append(np.sort(rows))


def cold_rows(trace: CodedTrace, memory: SharedMemory, share: float) -> ColdRows:
    """Return the row numbers of coded tokens that every step and layer of a trace must read.

    Parameters
    ----------
    trace
        What is asked for.
    memory, share
        What hot rows and codes have together, and the codes' share of it.
    """
    replay = _Brought(trace, memory, share)
    replay.replayed()
    return [one for one in replay.rows if one]


# --- How long it takes ---


@dataclass(frozen=True)
class ColdReads:
    """What reading a trace's cold coded tokens one way took, means per step over all layers.

    Parameters
    ----------
    way
        `rows` or `codes`.
    record_bytes
        Of a token in the file.
    tokens
        Cold coded tokens.
    reads, byte_count
        As the product plans them: neighbours closer than 8 KiB come in one read.
    seconds
        Measured; the median of turns.
    curve_seconds
        By the drive's rates at the mean size of each layer's reads.
    coding_seconds
        What coding the rows takes one thread; none for codes.
    """

    way: str
    record_bytes: int
    tokens: float
    reads: float
    byte_count: float
    seconds: float
    curve_seconds: float
    coding_seconds: float


class ColdReading:
    """Reads recorded tokens from files on a drive, by the product's engine and plan of reads.

    Parameters
    ----------
    directory
        On the drive.
    io
        Which engine reads.
    curve_bytes
        Read of each size to measure the drive's rates; of a file of 16 times as many.
    """

    def __init__(
        self, directory: Path, io: IOChoice = IOChoice.AUTO, curve_bytes: int = _CURVE_BYTES
    ) -> None:
        self._directory = directory
        self._curve_bytes = curve_bytes
        self._calls = DriveCalls()
        self.mode = probe_io_mode(directory, self._calls)
        self._engine: ReadEngine = open_engine(io, _THREADS, self._calls)
        self.curve = self._measured_curve()

    @property
    def engine_name(self) -> str:
        """As in the table of engines."""
        return self._engine.name

    def close(self) -> None:
        """Stop reading."""
        self._engine.close()

    def both(self, shape: ModelShape, coder: NativeValueCoder, rows: ColdRows) -> list[ColdReads]:
        """Return what both ways take, by turns on files of the same tokens.

        Parameters
        ----------
        shape
            Says what a row has.
        coder
            Codes rows, and says what codes have.
        rows
            What is cold.
        """
        most = 1 + max((int(one.max()) for own in rows for one in own if len(one)), default=0)
        tokens = round_up(most, GROUP_TOKENS)
        layers = max(map(len, rows))
        records = {
            "rows": shape.row_bytes,
            "codes": round_up(coder.row_bytes, RECORD_ALIGNMENT),
        }
        files = {way: self._file(layers * tokens * size) for way, size in records.items()}
        try:
            taken: dict[str, list[tuple[float, int, int, float]]] = {way: [] for way in records}
            for _ in range(_TURNS):
                for way, size in records.items():
                    taken[way].append(self._turn(files[way], size, tokens, rows))
        finally:
            for file in files.values():
                file.close()
        count, steps = sum(len(one) for own in rows for one in own), len(rows)
        coding = count / steps * _coding_seconds(coder)
        return [
            ColdReads(
                way,
                size,
                count / steps,
                taken[way][0][1] / steps,
                taken[way][0][2] / steps,
                median(one[0] for one in taken[way]) / steps,
                taken[way][0][3] / steps,
                coding if way == "rows" else 0.0,
            )
            for way, size in records.items()
        ]

    # --- inside ----------------------------------------------------------------------------

    def _turn(
        self, file: ColdFile, size: int, tokens: int, rows: ColdRows
    ) -> tuple[float, int, int, float]:
        """Read everything once; return seconds, reads, bytes, and seconds by the curve."""
        most = max((len(one) for own in rows for one in own), default=0)
        out = np.empty((max(1, most), size), np.uint8)
        buffer = aligned_buffer(8 << 20)
        seconds, reads, byte_count, by_curve = 0.0, 0, 0, 0.0
        for own in rows:
            for layer, one in enumerate(own):
                if not len(one):
                    continue
                wanted = FileRows(one + layer * tokens, out, np.arange(len(one)), buffer)
                started = time.perf_counter()
                cost = self._engine.land(file, wanted).cost
                seconds += time.perf_counter() - started
                reads += cost.reads
                byte_count += cost.byte_count
                by_curve += self.curve.read_seconds(cost.byte_count, cost.byte_count // cost.reads)
        return seconds, reads, byte_count, by_curve

    def _file(self, byte_count: int) -> ColdFile:
        """Return a file of so many random bytes: drives may be faster with zeros."""
        file = ColdFile(self._directory, self.mode, "tokens to measure with", self._calls)
        piece = aligned_buffer(_PIECE_BYTES)
        piece[:] = np.random.default_rng(0).integers(0, 256, _PIECE_BYTES, np.uint8)
        # One page more: reads are of whole ones.
        for offset in range(0, byte_count + PAGE_BYTES, _PIECE_BYTES):
            file.write(piece.data, offset)
        return file

    def _measured_curve(self) -> DriveRates:
        """Return rates of scattered reads by their size; writes are not looked at."""
        span = 16 * self._curve_bytes
        file = self._file(span)
        chance = np.random.default_rng(1)
        into = aligned_buffer(self._curve_bytes)
        rates = []
        try:
            for size in _CURVE_SIZES:
                count = self._curve_bytes // size
                taken = []
                for _ in range(_TURNS):
                    places = np.sort(chance.choice(span // size, count, replace=False))
                    at = np.arange(count) * size
                    wanted = Reads(places * size, at, np.full(count, size))
                    started = time.perf_counter()
                    self._engine.read(file, into, wanted)
                    taken.append(time.perf_counter() - started)
                rates.append(self._curve_bytes / median(taken))
        finally:
            file.close()
        return DriveRates(_CURVE_SIZES, tuple(rates), max(rates), 0.0)


def coder_of(trace: CodedTrace, shape: ModelShape) -> NativeValueCoder:
    """Return what codes rows of a shape."""
    return NativeValueCoder(kernel_spec(shape, trace.selected.settings))


def _coding_seconds(coder: NativeValueCoder) -> float:
    """Return how long one thread codes a token's values."""
    spec = coder.spec
    values = torch.randn(_CODED_TOKENS, spec.kv_heads, spec.head_dim).half()
    channels = spec.kv_heads, spec.head_dim
    statistics = ChannelStatistics(np.zeros(channels, np.int8), np.zeros(channels, np.int32))
    out = np.empty((_CODED_TOKENS, coder.row_bytes), np.uint8)
    taken = []
    for _ in range(_TURNS):
        started = time.perf_counter()
        coder.encode_rows(values, statistics, out)
        taken.append(time.perf_counter() - started)
    return min(taken) / _CODED_TOKENS


@dataclass(frozen=True)
class DriveCost:
    """What a read and a byte cost a drive, as of measured ways to read.

    Parameters
    ----------
    read_seconds, mebibyte_seconds
        Of each read, and of each MiB.
    deviation
        The largest share by which a time that follows from these is off.
    """

    read_seconds: float
    mebibyte_seconds: float
    deviation: float

    @classmethod
    def of(cls, measured: Sequence[ColdReads]) -> DriveCost:
        """Return the least squares of shares that times are off, of at least two ways to read."""
        seconds = np.array([one.seconds for one in measured])
        asked = np.array([(one.reads, one.byte_count / 2**20) for one in measured])
        own = asked / seconds[:, None]
        (read, mebibyte), *_ = np.linalg.lstsq(own, np.ones(len(own)), rcond=None)
        off = np.abs(own @ (read, mebibyte) - 1)
        return cls(float(read), float(mebibyte), float(off.max()))

    def text(self) -> str:
        """Return it as a line."""
        return (
            f"a read {self.read_seconds * 1e6:.1f} µs, a MiB {self.mebibyte_seconds * 1e3:.2f} ms: "
            f"least squares of the times, off by {self.deviation:.0%} at most"
        )


# --- What is printed ---

HEADS = (
    "shape", "text", "M0", "way", "bytes of a token", "cold tokens", "reads", "MB read",
    "ms, measured", "ms, by the curve", "ms to code",
)  # fmt: skip


def table(rows: Sequence[tuple[str, str, str, ColdReads]]) -> str:
    """Return rows of shape, text, budget and what was found as a Markdown table."""
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for shape, text, budget, one in rows:
        cells = (
            *(shape, text, budget, one.way, str(one.record_bytes), f"{one.tokens:.0f}"),
            *(f"{one.reads:.0f}", f"{one.byte_count / 1e6:.2f}", f"{one.seconds * 1e3:.2f}"),
            *(f"{one.curve_seconds * 1e3:.2f}", f"{one.coding_seconds * 1e3:.2f}"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
