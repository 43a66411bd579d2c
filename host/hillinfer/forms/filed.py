# SPDX-License-Identifier: Apache-2.0
"""Forms that lie packed in files on a drive, and are read into memory when they are opened.

Stored rows lie there too, a layer after the other, in 16 bits. A packed form has fewer bytes, and
they are read in order, past the page cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer, probe_io_mode, round_up
from hillinfer.errors import SettingsError
from hillinfer.forms.form import (
    DocumentStates,
    Form,
    FormRates,
    FormSeconds,
    MadeForm,
    OpenedForm,
)
from hillinfer.model_shape import ModelShape
from hillinfer.native.library import native_library
from hillinfer.placement.options import on_drive

# Tensors begin at multiples of it.
_ALIGNED = 64
# Bytes that have a checksum together; the last ones of an extent may be fewer.
_PIECE_BYTES = 256 << 10


@dataclass(frozen=True)
class Extent:
    """Where tensors lie in a file, one after the other.

    Parameters
    ----------
    offset, byte_count
        Of all of them, in bytes; whole pages.
    parts
        Type and shape of each.
    sums
        Checksums of its pieces of 256 KiB.
    """

    offset: int
    byte_count: int
    parts: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    sums: tuple[int, ...]


class FormFile:
    """A file of packed tensors that has no name, so that it is gone however the process ends.

    Nothing in it is encrypted, whatever the store is that forms are made from. One
    thread at a time uses it.

    Parameters
    ----------
    directory
        On the drive.
    calls
        How the drive is reached; the operating system itself where None.

    Raises
    ------
    ColdPoolError
        Where the directory cannot hold a file.
    """

    def __init__(self, directory: Path, calls: DriveCalls | None = None) -> None:
        self._file = ColdFile(directory, probe_io_mode(directory, calls), "forms", calls)
        self._end = 0
        # Offsets and bytes, by offset.
        self._free: dict[int, int] = {}

    def write(self, tensors: Sequence[torch.Tensor]) -> Extent:
        """Write tensors behind each other, and return where they lie.

        Raises
        ------
        ColdPoolError
            Where the drive refuses; nothing is kept then.
        """
        parts = tuple((one.dtype, tuple(one.shape)) for one in tensors)
        size = round_up(_sizes(parts)[-1], PAGE_BYTES)
        buffer = aligned_buffer(size)
        memory = torch.from_numpy(buffer)
        for begin, one in zip(_sizes(parts), tensors, strict=False):
            flat = one.detach().cpu().contiguous().view(-1).view(torch.uint8)
            memory[begin : begin + flat.numel()] = flat
        offset = self._room(size)
        try:
            self._file.write(buffer.data[:size], offset)
        except BaseException:
            self._free[offset] = size
            raise
        return Extent(offset, size, parts, tuple(map(_sum, _pieces(buffer[:size]))))

    def read(self, extent: Extent) -> list[torch.Tensor]:
        """Return the tensors, in memory of their own.

        Raises
        ------
        ColdPoolError
            Where the drive fails, or gives other bytes than were written.
        """
        buffer = aligned_buffer(extent.byte_count)
        self._file.read(buffer.data[: extent.byte_count], extent.offset)
        offset = extent.offset
        for piece, expected in zip(_pieces(buffer[: extent.byte_count]), extent.sums, strict=True):
            if _sum(piece) != expected:
                raise self._file.changed(len(piece), offset)
            offset += len(piece)
        memory = torch.from_numpy(buffer)
        tensors = []
        for begin, (dtype, shape) in zip(_sizes(extent.parts), extent.parts, strict=False):
            count = _byte_count(dtype, shape)
            tensors.append(memory[begin : begin + count].view(dtype).view(shape))
        return tensors

    def give(self, extent: Extent) -> None:
        """Let others have the place of what lay there."""
        self._free[extent.offset] = extent.byte_count

    def close(self) -> None:
        """Give the file's space back; harmless when done twice."""
        self._file.close()

    def _room(self, size: int) -> int:
        """Return a place of so many bytes: the first that is free and large enough, else the end.

        Places beside each other become one.
        """
        merged: dict[int, int] = {}
        last = None
        for offset, count in sorted(self._free.items()):
            if last is not None and last + merged[last] == offset:
                merged[last] += count
            else:
                last, merged[offset] = offset, count
        self._free = merged
        for offset, count in merged.items():
            if count >= size:
                del merged[offset]
                if count > size:
                    merged[offset + size] = count - size
                return offset
        offset, self._end = self._end, self._end + size
        return offset


class DriveForm(Form):
    """A form whose memory lies on a drive, and comes when it is opened.

    Parameters
    ----------
    form
        In memory it would be that.
    file
        Where it goes; open as long as what is made is.
    drive
        Number of its drive, from 1 on.

    Raises
    ------
    SettingsError
        Where that form has no memory of its own.
    """

    lies_on_drive = True

    def __init__(self, form: Form, file: FormFile, drive: int = 1) -> None:
        if form.lies_in_engine or not form.reads_states:
            raise SettingsError(
                f"form={form.name!r} has no memory that could lie on a drive: choose one like int8"
            )
        self._form, self._file, self._drive = form, file, drive
        self.drops_nothing, self.is_alike = form.drops_nothing, form.is_alike

    @property
    def name(self) -> str:
        """Like `drive-int8`, or `drive2-int8` on the second drive."""
        return on_drive(self._form.name, self._drive)

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the bytes on the drive, without the rest of the last page."""
        return self._form.byte_count(shape, tokens)

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Make the form and write it.

        Raises
        ------
        ColdPoolError
            Where the drive refuses.
        """
        made = self._form.make(model, states)
        parts = made.parts()
        hollow = made.with_parts([one.new_empty(0) for one in parts])
        return _MadeOnDrive(hollow, made.byte_count, self._file, self._file.write(parts))

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time of the form in memory, with the drive's rate as that of its tier."""
        return self._form.seconds(rates, shape, tokens)


class _MadeOnDrive(MadeForm):
    def __init__(self, hollow: MadeForm, byte_count: int, file: FormFile, extent: Extent) -> None:
        super().__init__(hollow.tokens)
        self._hollow, self._byte_count = hollow, byte_count
        self._file, self._extent = file, extent
        self._is_closed = False

    @property
    def byte_count(self) -> int:
        return self._byte_count

    def open(self) -> OpenedForm:
        return self._hollow.with_parts(self._file.read(self._extent)).open()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._file.give(self._extent)


def _byte_count(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    count = dtype.itemsize
    for length in shape:
        count *= length
    return count


def _sizes(parts: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[int]:
    """Return where each tensor begins, and where the last one ends."""
    begins = [0]
    for dtype, shape in parts:
        begins.append(begins[-1] + round_up(_byte_count(dtype, shape), _ALIGNED))
    return begins


def _pieces(memory: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
    return [memory[at : at + _PIECE_BYTES] for at in range(0, len(memory), _PIECE_BYTES)]


def _sum(piece: NDArray[np.uint8]) -> int:
    return int(native_library().crc32c(piece.reshape(1, -1), np.zeros(1, np.uint32))[0])
