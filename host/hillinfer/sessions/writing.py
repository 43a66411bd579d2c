# SPDX-License-Identifier: Apache-2.0
"""Writes a session's directory, whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import keep_names
from hillinfer.drive.files import ScratchPath, sweep
from hillinfer.errors import SessionError, reason_of, way_out
from hillinfer.sessions.manifest import MANIFEST_FILE, Manifest
from hillinfer.system.files import make_folders


class SessionWriter:
    """Collects files in a scratch directory beside the target and renames it at the end.

    A context manager that removes the scratch directory unless `finish` was reached; that of a
    process that was killed goes with the next writer there.

    `target` must not exist, or be empty. `calls` is how the drive is reached; the operating system
    itself where None. Raises SessionError where a session cannot be put there.
    """

    def __init__(self, target: Path, calls: DriveCalls | None = None) -> None:
        self._target = target
        self._calls = calls or DriveCalls()
        self.digests: dict[str, str] = {}
        self.byte_count = 0
        self._made: list[Path] = []
        check_target(target)
        sweep(target.absolute().parent, self._calls)
        try:
            make_folders(target.absolute().parent, self._calls.mkdir)
            self._scratch = ScratchPath.make_directory(target.absolute().parent, self._calls)
        except OSError as error:
            raise cannot_save(target, f"cannot write to {target.parent}", error) from error

    def add(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a file, piece behind piece, and wait until it is on the drive."""
        with self.adding(name) as write:
            for piece in pieces:
                write(piece)

    @contextmanager
    def adding(self, name: str) -> Iterator[Callable[[memoryview], None]]:
        """Write a file beside others: gives what takes its pieces, and waits for the drive last."""
        path = self._scratch.path / name
        self._made.append(path)
        try:
            descriptor = self._calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise cannot_save(self._target, f"cannot make {name}", error) from error
        sha256, written = hashlib.sha256(), 0

        def write(piece: memoryview) -> None:
            nonlocal written
            self._write(name, descriptor, piece, written)
            sha256.update(piece)
            written += len(piece)

        try:
            yield write
            try:
                self._calls.fsync(descriptor)
            except OSError as error:
                raise cannot_save(self._target, f"cannot write {name}", error) from error
        finally:
            with suppress(OSError):
                self._calls.close(descriptor)
        self.digests[name] = sha256.hexdigest()
        self.byte_count += written

    def link(
        self,
        name: str,
        publish: Callable[[Path], None],
        byte_count: int,
        content: Callable[[], Iterable[memoryview]],
    ) -> bool:
        """Let a file that is on the drive already have this name too, and say whether it has.

        `publish` gives the file a name and raises OSError where it cannot; `content` reads it, for
        its checksum. It must have `byte_count` bytes.
        """
        path = self._scratch.path / name
        self._made.append(path)
        try:
            publish(path)
            if path.stat().st_size != byte_count:
                path.unlink()
                return False
        except OSError:
            # Another file system, or one without such names: the rows are written again.
            with suppress(OSError):
                path.unlink()
            return False
        sha256 = hashlib.sha256()
        for piece in content():
            sha256.update(piece)
        self.digests[name] = sha256.hexdigest()
        self.byte_count += byte_count
        return True

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest and move everything to its place, at one moment."""
        self.add(MANIFEST_FILE, [memoryview(manifest.as_bytes())])
        try:
            self._calls.fsync(self._scratch.descriptor)
            self._calls.rename(self._scratch.path, self._target.absolute())
        except OSError as error:
            raise cannot_save(self._target, "cannot move it to its place", error) from error
        self._scratch.release()
        self._sync_parent()

    def __enter__(self) -> SessionWriter:
        return self

    def __exit__(self, *ended: object) -> None:
        # One by one, which works without any descriptor left; after `finish` none has this name.
        for path in self._made:
            with suppress(OSError):
                path.unlink()
        self._scratch.remove()

    def _write(self, name: str, descriptor: int, piece: memoryview, offset: int) -> None:
        done = 0
        while done < len(piece):
            try:
                count = self._calls.pwrite(descriptor, piece[done:], offset + done)
            except OSError as error:
                raise cannot_save(
                    self._target, f"cannot write {len(piece)} bytes at {offset} of {name}", error
                ) from error
            if count == 0:
                raise SessionError(
                    f"cannot save the session {self._target}: cannot write {len(piece)} bytes at "
                    f"{offset} of {name} ({done} bytes done): no progress; check the drive, or "
                    "choose another directory with --save-session"
                )
            done += count

    def _sync_parent(self) -> None:
        try:
            keep_names(self._target.absolute().parent, self._calls)
        except OSError as error:
            raise cannot_save(
                self._target, "it is whole but may not outlast a power failure", error
            ) from error


class CodesBeside:
    """Codes values of rows while these are written.

    Parameters
    ----------
    code
        Returns codes, uint8 (tokens, code_bytes), of a layer's rows from a position on, uint8
        (tokens, row_bytes).
    row_bytes, tokens
        Of a row, and how many are coded at once; no segment ends between them.
    """

    def __init__(
        self,
        code: Callable[[int, int, NDArray[np.uint8]], NDArray[np.uint8]],
        row_bytes: int,
        tokens: int,
    ) -> None:
        self._code, self._row_bytes, self._tokens = code, row_bytes, tokens

    def pieces(
        self,
        layer: int,
        content: Callable[[], Iterable[memoryview]],
        take: Callable[[memoryview], None],
    ) -> Iterator[memoryview]:
        """Yield a layer's rows as they come, and have `take` called with their codes.

        Parameters
        ----------
        layer, content
            Which one, and what yields all of its full groups, in pieces of any length.
        take
            Gets codes, in order.
        """
        held = np.empty((self._tokens, self._row_bytes), np.uint8)
        room, filled, first = held.reshape(-1), 0, 0
        for piece in content():
            yield piece
            data: NDArray[np.uint8] = np.frombuffer(piece, np.uint8)
            while len(data):
                count = min(len(room) - filled, len(data))
                room[filled : filled + count] = data[:count]
                data, filled = data[count:], filled + count
                if filled == len(room):
                    take(_bytes(self._code(layer, first, held)))
                    first, filled = first + self._tokens, 0
        if filled:
            take(_bytes(self._code(layer, first, held[: filled // self._row_bytes])))


def _bytes(codes: NDArray[np.uint8]) -> memoryview:
    return np.ascontiguousarray(codes).reshape(-1).data


def check_target(target: Path) -> None:
    """Refuse a place that holds something already.

    Raises SessionError where it is no directory, is not empty, or cannot be looked at.
    """
    try:
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            taken = "it is no directory"
        elif target.is_dir() and any(target.iterdir()):
            taken = "it is not empty, and nothing is overwritten"
        else:
            return
    except OSError as error:
        raise cannot_save(target, "cannot look at it", error) from error
    raise SessionError(
        f"cannot save the session {target}: {taken}; choose another directory with --save-session"
    )


def prepare_target(target: Path) -> None:
    """Refuse at once a place where a session cannot be saved later.

    Raises SessionError where something is there, or its parent takes no directory.
    """
    with SessionWriter(target):
        pass


def cannot_save(directory: Path, what: str, error: OSError) -> SessionError:
    """Return the error that says why a session cannot be saved and what to do."""
    fix = way_out(error, "choose another directory with --save-session")
    return SessionError(f"cannot save the session {directory}: {what}: {reason_of(error)}; {fix}")
