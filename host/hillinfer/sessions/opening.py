# SPDX-License-Identifier: Apache-2.0
"""Opens and checks a saved session; its files are read and never written."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import sums_of
from hillinfer.drive.files import PAGE_BYTES, IOMode, aligned_buffer
from hillinfer.drive.shared_files import OpenFiles, RowBase, ShadowBase, StoredBase
from hillinfer.errors import HillInferWarning, SessionError
from hillinfer.sessions.manifest import (
    CHANNEL_BYTES,
    MANIFEST_FILE,
    MOST_BYTES,
    Manifest,
    Part,
    code_bytes,
    damaged,
    rows_file,
    slot_bytes,
)
from hillinfer.sessions.session_file import SessionFile, cannot_open
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS

_MOST_THREADS = 8
# What costs time where it is not as it was saved, and never an answer.
_SPARE = frozenset({Part.CODES.value})


# --- The files of a session ---


class SavedSession:
    """The files of a session, open for reading; a context manager that closes them.

    Opening reads the manifest and looks at names and sizes; `verify` reads everything. What is
    used afterwards comes from the same open files. Codes of values may be missing or damaged.

    `calls` is how the drive is reached; the operating system itself where None. Raises SessionError
    where this is no session, or one whose files are missing, foreign, or of another size.
    """

    def __init__(self, directory: Path, calls: DriveCalls | None = None) -> None:
        self.directory = directory
        reached = calls or DriveCalls()
        with ExitStack() as opened:
            self.manifest = _manifest(directory, reached)
            sizes = self.manifest.file_bytes
            _check_names(directory, {MANIFEST_FILE, *sizes})
            self._files: dict[str, SessionFile] = {}
            self._taken: set[str] = set()
            self._sums: dict[str, NDArray[np.uint32]] = {}
            for name, byte_count in sizes.items():
                try:
                    file = SessionFile.open(directory, name, byte_count, reached)
                except SessionError:
                    if name not in _SPARE:
                        raise
                    continue
                opened.callback(file.close)
                self._files[name] = file
            opened.pop_all()

    @property
    def tokens(self) -> int:
        """Tokens that the session holds."""
        return self.manifest.extent.tokens

    def verify(self) -> None:
        """Read every file and compare its checksum.

        Raises SessionError for the first file that was changed or cannot be read. Codes of values
        are left out then, with a warning: rows have all that these have.
        """
        for layer in range(self.manifest.shape.layers):
            self._files[rows_file(layer)].go_direct()
        self._files[Part.SHADOW.value].go_direct()
        files = list(self._files.values())
        row_bytes = [self._sum_bytes.get(file.name, PAGE_BYTES) for file in files]
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
            found = list(threads.map(_digest_and_sums, files, row_bytes))
        for file, (digest, sums) in zip(files, found, strict=True):
            if digest != self.manifest.digests[file.name]:
                if file.name in _SPARE:
                    continue
                raise damaged(self.directory, f"{file.name} was changed: its checksum does not fit")
            if file.name in self._sum_bytes:
                self._sums[file.name] = sums
        if Part.CODES.value in self.manifest.digests and not self.has_codes:
            self.warn_of_codes("is not there as it was saved")

    @property
    def has_codes(self) -> bool:
        """Whether a verified session has codes of values that are as they were saved."""
        return Part.CODES.value in self._sums

    def warn_of_codes(self, what: str) -> None:
        """Say that codes of values are not taken from here; `what` goes behind the file's name."""
        warnings.warn(
            f"{Part.CODES.value} of the session {self.directory} {what}: its coded tokens are read "
            "as rows until they are coded again: same tokens, slower",
            HillInferWarning,
            stacklevel=3,
        )

    @property
    def _sum_bytes(self) -> dict[str, int]:
        """What is read piece by piece while the session is used: bytes of a piece by file."""
        shape = self.manifest.shape
        rows = {rows_file(layer): shape.row_bytes for layer in range(shape.layers)}
        spec = self.manifest.spec
        groups = {Part.CODES.value: GROUP_TOKENS * code_bytes(spec)}
        return {**rows, **groups, Part.SHADOW.value: slot_bytes(spec)}

    def token_ids(self) -> list[int]:
        """Return the ids of all tokens."""
        ids = self.array(Part.TOKENS, "<i4", (self.tokens,))
        if ids.min() < 0:
            raise damaged(self.directory, f"{Part.TOKENS.value} holds numbers that are no tokens")
        listed: list[int] = ids.tolist()
        return listed

    def array(self, part: Part, item_type: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a part that is small enough to be read whole."""
        content = bytearray(self._files[part.value].content())
        return np.frombuffer(content, item_type).reshape(shape)

    def read_into(self, part: Part, into: NDArray[np.uint8], offset: int) -> None:
        """Fill contiguous memory from a place of a part."""
        self._files[part.value].read(into.reshape(-1).data, offset)

    def read_rows(self, layer: int, first: int, into: NDArray[np.uint8]) -> None:
        """Read rows of full groups of a verified session, compared with what was verified.

        Parameters
        ----------
        layer, first
            Whose, and the first token, the first of a group.
        into
            uint8 (tokens, row_bytes), whole groups, page-aligned.

        Raises
        ------
        SessionError
            Where they cannot be read.
        ColdPoolError
            Where they changed since.
        """
        self._read_known(rows_file(layer), first, into)

    def read_codes(self, layer: int, first: int, into: NDArray[np.uint8]) -> None:
        """Read codes of values of full groups, where there are any, compared likewise.

        Parameters
        ----------
        layer, first
            Whose, and the first token, the first of a group.
        into
            uint8 (tokens, code_bytes), whole groups, contiguous.

        Raises
        ------
        SessionError, ColdPoolError
            As `read_rows` does.
        """
        extent, size = self.manifest.extent, GROUP_TOKENS * into.shape[1]
        group = layer * extent.groups + first // GROUP_TOKENS
        self._read_known(Part.CODES.value, group, into.reshape(-1, size))

    def _read_known(self, name: str, first: int, into: NDArray[np.uint8]) -> None:
        """Fill memory with pieces of a file from a number on, and compare their checksums."""
        file = self._files[name]
        offset = first * into.shape[1]
        file.read(into.reshape(-1).data, offset)
        known = self._sums[name][first : first + len(into)]
        if (sums_of(into, np.arange(len(into))) != known).any():
            raise file.changed(into.nbytes, offset)

    def take_base(self, groups: int, open_files: OpenFiles) -> StoredBase:
        """Hand the files of rows and shadow over, to be closed by whoever reads them from now on.

        Verifies the session where that was not done; its checksums go with the files. `groups` is
        how many of the session's groups will be read; `open_files` has descriptors for them.
        """
        manifest = self.manifest
        if not self._sums:
            self.verify()
        names = [rows_file(layer) for layer in range(manifest.shape.layers)]
        files = [self._files[name] for name in names]
        shadow = self._files[Part.SHADOW.value]
        for file in (*files, shadow):
            file.share(open_files)
        direct = all(file.io_mode is IOMode.DIRECT for file in files if file.byte_count)
        base = StoredBase(
            RowBase(
                files,
                groups,
                IOMode.DIRECT if direct else IOMode.BUFFERED,
                [self._sums.pop(name) for name in names],
                tuple(self._key(file) for file in files),
            ),
            ShadowBase(
                shadow,
                manifest.extent.segments * manifest.shape.layers,
                slot_bytes(manifest.spec),
                self._sums.pop(shadow.name),
                self._key(shadow),
            ),
        )
        # Last: until they have been handed over this closes them.
        self._taken = {*names, shadow.name}
        return base

    def _key(self, file: SessionFile) -> Hashable:
        """Return what a file has in common with itself alone, while nobody writes to it."""
        return file.identity, self.manifest.digests[file.name]

    def close(self) -> None:
        """Close all files that were not handed over; harmless when done twice."""
        for name, file in self._files.items():
            if name not in self._taken:
                file.close()

    def __enter__(self) -> SavedSession:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


def _digest_and_sums(file: SessionFile, row_bytes: int) -> tuple[str, NDArray[np.uint32]]:
    """Return those of a file; none where it cannot be read and nothing depends on it."""
    try:
        return file.digest_and_sums(row_bytes)
    except SessionError:
        if file.name not in _SPARE:
            raise
        return "", np.zeros(0, np.uint32)


def _manifest(directory: Path, calls: DriveCalls) -> Manifest:
    try:
        is_there = stat.S_ISDIR(directory.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        is_there = False
    except OSError as error:
        raise cannot_open(directory, "it cannot be looked at", error) from error
    if not is_there:
        raise SessionError(
            f"there is no session {directory}: save one with --save-session, or check the path"
        )
    file = SessionFile.open(directory, MANIFEST_FILE, None, calls)
    try:
        if file.byte_count > MOST_BYTES:
            raise damaged(directory, f"its manifest of {file.byte_count} bytes is too large")
        return Manifest.parse(file.content(), directory)
    finally:
        file.close()


def _check_names(directory: Path, expected: set[str]) -> None:
    try:
        found = set(os.listdir(directory))  # noqa: PTH208  (names as they are, no paths)
    except OSError as error:
        raise cannot_open(directory, "it cannot be listed", error) from error
    if found - expected:
        raise damaged(directory, f"it holds a file that is not its own, {min(found - expected)!a}")
    if lost := expected - found - _SPARE:
        raise damaged(directory, f"{min(lost)} is missing")


# --- Codes and statistics, segment by segment ---

# Stands for a segment of a layer that has taken no statistics yet.
UNCODED = -1
# All bytes of statistics that no values have: c is no such number.
NOT_TAKEN = 127
_EXPONENTS = (-14, 16)
_MEAN_LIMIT = (1 << 23) - 1


class SavedShadow:
    """Codes and statistics of a session's segments in all layers.

    Parameters
    ----------
    session
        Whose.

    Attributes
    ----------
    session
        As given.
    coded
        int32 (segments, layers): tokens coded, -1 where no statistics were taken.
    """

    def __init__(self, session: SavedSession) -> None:
        self.session = session
        # Direct I/O reads whole slots, into aligned memory.
        self._staging: NDArray[np.uint8] | None = None
        manifest = session.manifest
        self._spec = manifest.spec
        shape = (manifest.extent.segments, manifest.shape.layers)
        self.coded: NDArray[np.int32] = session.array(Part.CODED, "<i4", shape)
        begun = np.arange(shape[0])[:, None] * self._spec.segment_tokens
        room = np.minimum(session.tokens - begun, self._spec.segment_tokens)
        if ((self.coded < UNCODED) | (self.coded > room)).any():
            raise damaged(session.directory, f"{Part.CODED.value} counts tokens that are not there")

    def statistics(self, segment: int, layer: int) -> ChannelStatistics | None:
        """Return the statistics of one segment and layer, None where none were taken."""
        if self.coded[segment, layer] == UNCODED:
            return None
        return self._taken(Part.STATISTICS, segment, layer)

    def value_codes(self, layer: int, first: int, tokens: int) -> NDArray[np.uint8]:
        """Return codes of values of full groups, uint8 (tokens, code_bytes); see `read_codes`."""
        codes = np.empty((tokens, code_bytes(self._spec)), np.uint8)
        self.session.read_codes(layer, first, codes)
        return codes

    def values(self, segment: int, layer: int) -> ChannelStatistics | None:
        """Return the statistics of a segment's values, None where none were taken."""
        if Part.VALUES.value not in self.session.manifest.digests:
            return None
        return self._taken(Part.VALUES, segment, layer)

    def _taken(self, part: Part, segment: int, layer: int) -> ChannelStatistics | None:
        shape = (self._spec.kv_heads, self._spec.head_dim)
        channels = shape[0] * shape[1]
        packed = np.empty(channels * CHANNEL_BYTES, np.uint8)
        place = segment * self.coded.shape[1] + layer
        self.session.read_into(part, packed, place * len(packed))
        if part is Part.VALUES and (packed == NOT_TAKEN).all():
            return None
        exponents = packed[:channels].view(np.int8).reshape(shape).copy()
        means = packed[channels:].copy().view("<i4").astype(np.int32).reshape(shape)
        low, high = _EXPONENTS
        if (
            exponents.min() < low
            or exponents.max() > high
            or max(-int(means.min()), int(means.max())) > _MEAN_LIMIT
        ):
            raise damaged(
                self.session.directory,
                f"{part.value} holds numbers outside the scoring contract",
            )
        return ChannelStatistics(exponents, means)

    def read_codes(self, segment: int, layer: int, into: NDArray[np.uint8]) -> None:
        """Fill a segment's shadow of one layer, uint8 (segment_beats, 64)."""
        size = slot_bytes(self._spec)
        if self._staging is None:
            self._staging = aligned_buffer(size)[:size]
        self.session.read_into(Part.SHADOW, self._staging, self.slot(segment, layer) * size)
        into.reshape(-1)[:] = self._staging[: into.size]

    def slot(self, segment: int, layer: int) -> int:
        """Return the slot of a segment in a layer: a layer's segments lie one behind the other."""
        return layer * self.session.manifest.extent.segments + segment
