# SPDX-License-Identifier: Apache-2.0
"""The device `xrt`: a card, or its emulation, behind the genuine XRT library."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hillinfer.devices.device import (
    ROWS_TOGETHER,
    DeviceSegment,
    FilePiece,
    ScoreArrays,
    ScoredTokens,
    StoredRows,
    StoredShadow,
    queries_each,
    shadow_descriptors,
)
from hillinfer.devices.slots import RowSlots, slot_beats
from hillinfer.devices.xrt.process import Deadlines, MemoryClaims, WorkerProcess
from hillinfer.devices.xrt.worker import ROWS_CHUNK
from hillinfer.errors import DeviceError
from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_error import ErrorCode, LaunchError
from hillinfer_model.score_launch import scope_number
from hillinfer_model.status_beat import HASH_BYTES, StatusBeat

# --- Sizes of P2P reads ---

BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
# Loads that each size is tried for, and the share of the best rate that is good enough: between
# sizes as fast as each other the smaller one leaves more reads to be in flight.
_TRIALS = 3
_ENOUGH = 0.95


class ReadSizes:
    """The rates of one drive and card by bytes per read, and the size they speak for.

    The first loads try all sizes in turn, so measuring reads nothing that was not wanted anyway. A
    block is never larger than a load's `load_bytes`.
    """

    def __init__(self, load_bytes: int) -> None:
        self._blocks = [block for block in BLOCKS if block < load_bytes] + [load_bytes]
        self._blocks = self._blocks[: len(BLOCKS)]
        self._seconds: dict[int, list[float]] = {block: [] for block in self._blocks}
        self._load_bytes = load_bytes
        self._chosen: int | None = None

    @property
    def rates(self) -> dict[int, float]:
        """Best bytes per second of each size that was tried."""
        return {
            block: self._load_bytes / min(seconds)
            for block, seconds in self._seconds.items()
            if seconds
        }

    def block_bytes(self) -> int:
        """Return the size of the next load's reads."""
        if self._chosen is None:
            untried = min(self._blocks, key=lambda block: len(self._seconds[block]))
            if len(self._seconds[untried]) < _TRIALS:
                return untried
            enough = _ENOUGH * max(self.rates.values())
            self._chosen = min(block for block, rate in self.rates.items() if rate >= enough)
        return self._chosen

    def note(self, block_bytes: int, seconds: float) -> None:
        """Take down how long a load took."""
        if self._chosen is None:
            self._seconds[block_bytes].append(max(seconds, 1e-9))


# --- The device ---

# Shadows are taken room for in pieces, as they come.
CHUNK_BYTES = 64 << 20
_PAGE = 4096
# As many as surely fit in a message.
_PIECES_A_MESSAGE = 512
_MOST_LAUNCH_ID = 1 << 32


class XrtDevice:
    """Shadows in a card's memory, scored by its kernel; see `ScoringDevice`.

    `worker` has opened the card, `claims` admit what is taken of its memory, and `deadlines` say
    when to give it up. `chunk_bytes` is the least of its memory that is taken at a time. `slots`
    says how many shadows it has room for, `reads` the rates of reads from the drive.
    """

    def __init__(
        self,
        spec: KernelSpec,
        worker: WorkerProcess,
        memory_bytes: int,
        claims: MemoryClaims,
        deadlines: Deadlines,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._spec = spec
        self._worker = worker
        self._claims = claims
        self._deadlines = deadlines
        # Whole pages, as files hold them.
        self._slot_bytes = -(-slot_beats(spec) * BEAT_BYTES // _PAGE) * _PAGE
        self._per_chunk = max(chunk_bytes // self._slot_bytes, 1)
        self._chunk_bytes = self._per_chunk * self._slot_bytes
        chunks = memory_bytes // self._chunk_bytes
        self.slots = chunks * self._per_chunk
        self.reads = ReadSizes(self._slot_bytes)
        self._addresses: list[int] = []
        self._launches = 0
        # Bytes that rows have room for at the card; 0 before the first come.
        self._rows_bytes = 0
        self._scoring: _Scoring | None = None
        # Bytes of the reads beside the launch under way, and how many shadows they bring.
        self._ahead = (0, 0)
        self._release = weakref.finalize(self, claims.release)

    def has_room(self, slot: int) -> bool:
        """Take memory for a slot where it is not there yet; see `ScoringDevice`."""
        with self._idle():
            while len(self._addresses) <= slot // self._per_chunk:
                if not self._take_chunk():
                    return False
        return True

    def _take_chunk(self) -> bool:
        """Take the next piece of memory; False where a card that is in use has no more."""
        if not self._claims.claim(self._chunk_bytes):
            reason = "other processes hold all of its memory"
        else:
            answer = self._ask("chunk", size=self._chunk_bytes)
            if "address" in answer:
                self._addresses.append(int(answer["address"]))
                return True
            self._claims.give_back(self._chunk_bytes)
            reason = str(answer["full"])
        if not self._addresses:
            raise DeviceError(
                f"the card gives no memory that a drive can reach (P2P): {reason}; "
                "`hillinfer doctor` looks at the card"
            )
        return False

    def write(self, slot: int, first_beat: int, beats: Beats) -> None:
        """Put beats into a slot's shadow; see `ScoringDevice`."""
        with self._idle():
            chunk, offset = self._place(slot)
            self._fits(beats.nbytes)
            self._worker.window[: beats.nbytes] = beats.reshape(-1)
            start = offset + first_beat * BEAT_BYTES
            self._ask("write", chunk=chunk, offset=start, at=0, size=beats.nbytes)

    def load(self, shadows: Sequence[StoredShadow]) -> None:
        """Fill slots from files by P2P, their blocks in flight together; see `ScoringDevice`."""
        with self._idle():
            block = self.reads.block_bytes()
            files, parts = self._loads(shadows)
            answer = self._ask("load", files, parts=parts, block=block)
            self.reads.note(block, float(answer["seconds"]) / len(shadows))

    def _loads(self, shadows: Sequence[StoredShadow]) -> tuple[list[int], list[list[int]]]:
        """Return the files of shadows, and what the worker is told of each shadow."""
        files = sorted({one.file for one in shadows})
        return files, [
            [files.index(one.file), *self._place(one.slot), one.offset, self._slot_bytes]
            for one in shadows
        ]

    @property
    def rows_together(self) -> int:
        """Of how many segments it makes shadows at once; see `ScoringDevice`."""
        return ROWS_TOGETHER

    def make(self, rows: Sequence[StoredRows]) -> bool:
        """Read rows by P2P and launch `make_shadow`; see `ScoringDevice`."""
        with self._idle():
            if not self._take_rows(ROWS_TOGETHER * rows[0].byte_count):
                return False
            self._load_pieces([(ROWS_CHUNK, 0, [piece for one in rows for piece in one.pieces])])
            self._launches = (self._launches + 1) % _MOST_LAUNCH_ID
            lowest, places = self._places([one.slot for one in rows])
            contents = shadow_descriptors(self._spec, rows, places)
            self._worker.send(
                "make",
                chunk=self._addresses.index(lowest),
                parts=self._shared(dict(zip(("segments", "statistics"), contents, strict=True))),
                segments=len(rows),
                launch_id=self._launches,
            )
            made = [0] * len(rows)
            while (beats := self._followed("make")) is not None:
                for index, beat in beats:
                    made[index] = self.check(beat, self._launches)
            if made != [self._spec.segment_tokens] * len(rows):
                raise self._wrong("shadows of fewer tokens than it was given rows of")
            return True

    def _take_rows(self, size: int) -> bool:
        """Take memory of the card that rows are read to, where it has any left."""
        if size > self._rows_bytes:
            if not self._claims.claim(size):
                return False
            full = "full" in self._ask("rows", size=size)
            self._claims.give_back(size if full else self._rows_bytes)
            if full:
                return False
            self._rows_bytes = size
        return True

    def _load_pieces(self, loads: Sequence[tuple[int, int, Sequence[FilePiece]]]) -> None:
        """Read pieces of files one behind the other, each load's from a place in a chunk on."""
        files = sorted({one.file for _, _, pieces in loads for one in pieces})
        parts = []
        for chunk, at, pieces in loads:
            for one in pieces:
                parts.append([files.index(one.file), chunk, at, one.offset, one.size])
                at += one.size
        for start in range(0, len(parts), _PIECES_A_MESSAGE):
            own = parts[start : start + _PIECES_A_MESSAGE]
            self._ask("load", files, parts=own, block=self.reads.block_bytes())

    def read(self, slot: int, into: Beats) -> None:
        """Read a slot's shadow; see `ScoringDevice`."""
        with self._idle():
            chunk, offset = self._place(slot)
            self._fits(into.nbytes)
            self._ask("read", chunk=chunk, offset=offset, at=0, size=into.nbytes)
            into[:] = self._worker.window[: into.nbytes].reshape(into.shape)

    @property
    def queries_together(self) -> int:
        """Queries that a pass of its kernel scores; see `ScoringDevice`."""
        return self._spec.queries

    def score(
        self,
        scope: Scope,
        queries: Beats,
        segments: Sequence[DeviceSegment],
        ahead: Sequence[StoredShadow] = (),
    ) -> Iterator[ScoredTokens]:
        """Launch the kernel; see `ScoringDevice`."""
        with self._idle():
            self._launches = (self._launches + 1) % _MOST_LAUNCH_ID
            lowest, places = self._places([one.slot for one in segments])
            each = queries_each(self._spec, queries, len(segments))
            arrays = ScoreArrays(self._spec, scope, segments, each)
            scores = arrays.beats * BEAT_BYTES
            blocks = self._blocks(arrays, segments, places)
            parts = self._shared({**blocks, "queries": queries}, scores=scores)
            block = self.reads.block_bytes()
            files, loads = self._loads(ahead)
            self._worker.send(
                "score",
                files,
                chunk=self._addresses.index(lowest),
                parts=parts,
                score_bytes=[beats * BEAT_BYTES for beats in arrays.starts],
                scope=scope_number(scope, each),
                launch_id=self._launches,
                ahead=loads,
                block=block,
            )
            start, size = parts["scores"]
            window = self._worker.window[start : start + size].reshape(-1, BEAT_BYTES)
            self._scoring = _Scoring(self, arrays, segments, window, self._launches)
            self._ahead = block, len(ahead)
            return iter(self._scoring)

    def _blocks(
        self, arrays: ScoreArrays, segments: Sequence[DeviceSegment], places: Sequence[int]
    ) -> dict[str, Beats]:
        """Return what a launch is told of segments, whose keys lie at places of the memory."""
        return {"segments": arrays.descriptors(places)}

    def _places(self, slots: Sequence[int]) -> tuple[int, list[int]]:
        """Return the lowest address of shadows, and where those of slots lie from there, in beats.

        Offsets count from the buffer that the kernel is given: the one at the lowest address.
        """
        lowest, places = min(self._addresses), []
        for slot in slots:
            chunk, offset = self._place(slot)
            places.append((self._addresses[chunk] - lowest + offset) // BEAT_BYTES)
        return lowest, places

    def _shared(self, contents: Mapping[str, Beats], **sizes: int) -> dict[str, list[int]]:
        """Put blocks of beats into the window; return where they and some more bytes lie there."""
        at, parts = 0, {}
        for name, size in [*((name, one.nbytes) for name, one in contents.items()), *sizes.items()]:
            parts[name] = [at, size]
            at += -(-size // _PAGE) * _PAGE
        self._fits(at)
        for name, content in contents.items():
            start, size = parts[name]
            self._worker.window[start : start + size] = content.reshape(-1)
        return parts

    def close(self) -> None:
        """Let go of the card; harmless when done twice."""
        self._worker.close()
        self._release()

    def progress(self) -> list[tuple[int, Beats]] | None:
        """Wait for the next status beats of the launch under way, by segment; None: it has ended.

        The scores that they count lie in the window before they come.
        """
        with self._whole():
            beats = self._followed("score")
            if beats is None:
                self._scoring = None
            return beats

    def _followed(self, what: str) -> list[tuple[int, Beats]] | None:
        answer = self._worker.receive(what, self._deadlines.progress)
        if "seconds" in answer:
            block, loads = self._ahead
            self.reads.note(block, float(answer["seconds"]) / loads)
        if "status" in answer:
            return [
                (int(index), np.frombuffer(bytes.fromhex(beat), np.uint8).reshape(1, BEAT_BYTES))
                for index, beat in answer["status"]
            ]
        if answer.get("state") != "ERT_CMD_STATE_COMPLETED":
            self._scoring = None
            self._worker.close()
            raise DeviceError(f"the card ended a launch with {answer.get('state')}")
        return None

    def check(self, beat: Beats, launch_id: int) -> int:
        """Return the tokens that a status beat counts complete, or raise what it says is wrong."""
        try:
            status = StatusBeat.unpack(beat)
        except (LaunchError, ValueError) as error:
            raise self._wrong(f"a status that cannot be read: {error}") from error
        if status.spec_hash != self._spec.digest()[:HASH_BYTES]:
            raise self._wrong(
                f"the status of another kernel: its spec hash starts with "
                f"{status.spec_hash.hex()}, the xclbin's with "
                f"{self._spec.digest()[:HASH_BYTES].hex()}"
            )
        if status.launch_id != launch_id:
            raise self._wrong(f"the status of launch {status.launch_id}, not {launch_id}")
        if status.error is not ErrorCode.NONE:
            raise self._wrong(f"error {status.error.name}")
        return status.tokens_complete

    def _wrong(self, what: str) -> DeviceError:
        self._worker.close()
        return DeviceError(f"the card's kernel left {what}")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Let the card go where a call is interrupted: its answer would pass for a later call's."""
        try:
            yield
        except DeviceError:
            raise
        except BaseException:
            self._worker.abandon()
            raise

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Do the same, once a launch has ended that nobody listens to any more."""
        with self._whole():
            while self._scoring is not None:
                self.progress()
            yield

    def _place(self, slot: int) -> tuple[int, int]:
        """Return chunk and offset in bytes of a slot that has room."""
        chunk, index = divmod(slot, self._per_chunk)
        return chunk, index * self._slot_bytes

    def _ask(self, what: str, files: Sequence[int] = (), **given: object) -> dict[str, Any]:
        return self._worker.ask(what, self._deadlines.answer, files, **given)

    def _fits(self, size: int) -> None:
        if size > self._worker.window.nbytes:
            raise DeviceError(
                f"{size} bytes do not fit in the {self._worker.window.nbytes} that host and "
                "worker share: score fewer segments at a time"
            )


class XrtRowsDevice(XrtDevice):
    """Rows in a card's memory, whose keys its kernel casts while it scores (key mode `fp16`)."""

    @cached_property
    def _rows(self) -> RowSlots:
        return RowSlots(self._spec)

    def make(self, rows: Sequence[StoredRows]) -> bool:
        """Read rows into their slots by P2P; see `ScoringDevice`."""
        with self._idle():
            self._load_pieces([(*self._place(one.slot), one.pieces) for one in rows])
            for one in rows:
                self._rows.note(one)
            return True

    def read(self, slot: int, into: Beats) -> None:
        """Cast a slot's keys to a shadow; see `ScoringDevice`."""
        rows = np.empty((slot_beats(self._spec), BEAT_BYTES), dtype=np.uint8)
        super().read(slot, rows)
        self._rows.cast(slot, rows, into)

    def _blocks(
        self, arrays: ScoreArrays, segments: Sequence[DeviceSegment], places: Sequence[int]
    ) -> dict[str, Beats]:
        return self._rows.blocks(arrays, segments, places)


@dataclass(frozen=True, eq=False)
class _Scoring:
    """The parts of one launch, as they are finished."""

    device: XrtDevice
    arrays: ScoreArrays
    segments: Sequence[DeviceSegment]
    scores: Beats
    launch_id: int

    def __iter__(self) -> Iterator[ScoredTokens]:
        done = [0] * len(self.segments)
        while (beats := self.device.progress()) is not None:
            for index, beat in beats:
                first, complete = done[index], self.device.check(beat, self.launch_id)
                if not first <= complete <= self.segments[index].tokens:
                    raise DeviceError(
                        f"the card counts {complete} tokens of a segment of "
                        f"{self.segments[index].tokens}, after {first}"
                    )
                done[index] = complete
                if complete > first:
                    yield self.arrays.scored(index, first, complete, self.scores)
        if done != [one.tokens for one in self.segments]:
            raise DeviceError("the card ended a launch before all of its tokens were scored")
