# SPDX-License-Identifier: Apache-2.0
"""A session in its directory, opened and checked."""

from __future__ import annotations

import os
import stat
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.sessions.errors import SessionError, cannot_open, damaged
from hillinfer.sessions.manifest import MOST_BYTES, Manifest
from hillinfer.sessions.session_file import SessionFile
from hillinfer.sessions.session_files import MANIFEST_FILE, Part, rows_file, slot_bytes
from hillinfer.storage.aligned_buffer import PAGE_BYTES
from hillinfer.storage.cold_file import IOMode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.open_files import OpenFiles
from hillinfer.storage.stored_base import RowBase, ShadowBase, StoredBase

_MOST_THREADS = 8


class SavedSession:
    """The files of a session, open for reading; a context manager that closes them.

    Opening reads the manifest and looks at names and sizes; `verify` reads everything. What is
    used afterwards comes from the same open files.

    Parameters
    ----------
    directory
        The session's.
    calls
        How the drive is reached; the operating system itself where None.

    Raises
    ------
    SessionError
        Where this is no session, or one whose files are missing, foreign, or of another size.
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
                file = SessionFile.open(directory, name, byte_count, reached)
                opened.callback(file.close)
                self._files[name] = file
            opened.pop_all()

    @property
    def tokens(self) -> int:
        """Tokens that the session holds."""
        return self.manifest.extent.tokens

    @property
    def byte_count(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.byte_count for file in self._files.values())

    def verify(self) -> None:
        """Read every file and compare its checksum.

        Raises
        ------
        SessionError
            For the first file that was changed or cannot be read.
        """
        for layer in range(self.manifest.shape.layers):
            self._files[rows_file(layer)].go_direct()
        self._files[Part.SHADOW.value].go_direct()
        files = list(self._files.values())
        row_bytes = [self._sum_bytes.get(file.name, PAGE_BYTES) for file in files]
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
            found = list(threads.map(SessionFile.digest_and_sums, files, row_bytes))
        for file, (digest, sums) in zip(files, found, strict=True):
            if digest != self.manifest.digests[file.name]:
                raise damaged(self.directory, f"{file.name} was changed: its checksum does not fit")
            if file.name in self._sum_bytes:
                self._sums[file.name] = sums

    @property
    def _sum_bytes(self) -> dict[str, int]:
        """What is read piece by piece while the session is used: bytes of a piece by file."""
        shape = self.manifest.shape
        rows = {rows_file(layer): shape.row_bytes for layer in range(shape.layers)}
        return {**rows, Part.SHADOW.value: slot_bytes(self.manifest.spec)}

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

    def take_base(self, groups: int, open_files: OpenFiles) -> StoredBase:
        """Hand the files of rows and shadow over, to be closed by whoever reads them from now on.

        Verifies the session where that was not done; its checksums go with the files.

        Parameters
        ----------
        groups
            How many of the session's groups will be read.
        open_files
            Has descriptors for them.
        """
        manifest = self.manifest
        if not self._sums:
            self.verify()
        names = [rows_file(layer) for layer in range(manifest.shape.layers)]
        files = [self._files[name] for name in names]
        shadow = self._files[Part.SHADOW.value]
        self._taken = {*names, shadow.name}
        for file in (*files, shadow):
            file.share(open_files)
        direct = all(file.io_mode is IOMode.DIRECT for file in files if file.byte_count)
        return StoredBase(
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
    if expected - found:
        raise damaged(directory, f"{min(expected - found)} is missing")
