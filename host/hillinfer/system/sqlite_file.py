# SPDX-License-Identifier: Apache-2.0
"""An SQLite file: one connection for all threads, whose failures become errors of its owner."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer.errors import HillInferError

_BUSY_SECONDS = 10.0
# What says that the contents are wrong. All else says nothing against the file: it is in use, its
# drive is full or failing, or there is too little memory or too few descriptors.
_BROKEN = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Noted in `meta` by whoever met broken contents in use. Comparing tables with their indexes takes
# ten times as long as the quick look of each opening, which does not see where these differ.
_SUSPECT = "suspect"


def is_broken(error: BaseException | None) -> bool:
    """Return whether an error of SQLite says that a file's contents are wrong, now and later."""
    # What is found here has no number of SQLite's.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return isinstance(error, sqlite3.DatabaseError) and code & 0xFF in _BROKEN


@dataclass(frozen=True)
class FileKind:
    """What a database file is to its users.

    Parameters
    ----------
    name
        As errors call it, like `the catalogue`.
    error
        What is raised where it fails.
    way_out
        What to do where its contents are broken; empty where its owner says that itself.
    """

    name: str
    error: type[HillInferError]
    way_out: str = ""

    def failure(self, path: Path, what: str, error: sqlite3.Error) -> HillInferError:
        """Return what to raise where SQLite refuses; `what` is like `cannot be used`."""
        advice = f"; {self.way_out}" if self.way_out and is_broken(error) else ""
        return self.error(f"{self.name} {path} {what}: {error}{advice}")


class SqliteFile:
    """One process' connection to an existing file; any of its threads may use it.

    A child that is forked has none: what SQLite holds is its parent's, which goes on.

    Parameters
    ----------
    kind
        What it is to its users.
    path
        Where it lies.
    identity
        What its table `meta` must have noted as `store`.
    checked_bytes
        A file up to this size is looked at as a whole first; None for any size.
    prepared
        Texts of queries that are kept prepared.

    Raises
    ------
    HillInferError
        The kind's, where the file is broken, or another store's or version's.
    """

    def __init__(
        self,
        kind: FileKind,
        path: Path,
        identity: str,
        checked_bytes: int | None = None,
        prepared: int = 128,
    ) -> None:
        self.kind, self.path = kind, path
        self._lock = threading.RLock()
        self._pid = os.getpid()
        try:
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=rw",
                uri=True,
                timeout=_BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=prepared,
            )
            try:
                ((pages,),) = self._db.execute("PRAGMA page_count").fetchall()
                ((size,),) = self._db.execute("PRAGMA page_size").fetchall()
                if checked_bytes is None or pages * size <= checked_bytes:
                    self._check("quick_check")
                own = self._db.execute("SELECT value FROM meta WHERE name = 'store'").fetchone()
                if own != (identity,):
                    raise sqlite3.DatabaseError("it is another store's, or another version's")
                self._check_suspect()
            except BaseException:
                self._db.close()
                raise
        except sqlite3.Error as error:
            raise kind.failure(path, "cannot be used", error) from error

    @staticmethod
    def make(
        kind: FileKind,
        path: Path,
        schema: str,
        identity: str,
        fill: Callable[[sqlite3.Connection], object] = lambda db: None,
    ) -> None:
        """Make a new file, for its owner only.

        Parameters
        ----------
        kind, path, identity
            As above; there is no file yet.
        schema
            Statements that make its tables, `meta(name, value)` among them.
        fill
            Puts into it what it begins with.

        Raises
        ------
        OSError
            Where the file cannot be made.
        HillInferError
            The kind's, where SQLite refuses.
        """
        # SQLite gives the files beside it the rights of this one.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
        try:
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.executescript(schema)
                db.execute("INSERT INTO meta VALUES ('store', ?)", (identity,))
                fill(db)
        except sqlite3.Error as error:
            raise kind.failure(path, "cannot be made", error) from error

    @property
    def is_inherited(self) -> bool:
        """Whether it was opened before this process was forked."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Refuse, with the kind's error, where it was opened before this process was forked."""
        if self.is_inherited:
            raise self.kind.error(
                f"{self.kind.name} {self.path} was opened before this process was forked: open it "
                "again in the child"
            )

    def close(self) -> None:
        """Close the connection; harmless when done twice, and in a child that was forked."""
        if self.is_inherited:
            return
        with self._lock:
            self._db.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads of this process waiting."""
        with self._lock:
            yield

    def check(self) -> None:
        """Look at all of it, tables and their indexes, a minute for a gigabyte.

        Raises
        ------
        HillInferError
            The kind's, where it is broken.
        """
        self.check_process()
        with self._lock:
            try:
                self._check("integrity_check")
            except sqlite3.Error as error:
                raise self._failure("is broken", error) from error

    def rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Return the rows that a query finds, outside of a transaction."""
        self.check_process()
        with self._lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise self._failure("failed", error) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Change all or nothing, alone; what SQLite refuses becomes the kind's error."""
        self.check_process()
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    # SQLite has rolled some back itself, and what it said first counts. One that
                    # could not be committed is still open, and would keep others out.
                    if self._db.in_transaction:
                        with suppress(sqlite3.Error):
                            self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._failure("failed", error) from error

    def _check(self, how: str) -> None:
        ((found,),) = self._db.execute(f"PRAGMA {how}(1)").fetchall()
        if found != "ok":
            raise sqlite3.DatabaseError(found)

    def _check_suspect(self) -> None:
        """Look at all of it where somebody met broken contents."""
        if self._db.execute("SELECT 1 FROM meta WHERE name = ?", (_SUSPECT,)).fetchone():
            self._check("integrity_check")
            # Where it cannot be changed now, it is looked at once more.
            with suppress(sqlite3.Error):
                self._db.execute("DELETE FROM meta WHERE name = ?", (_SUSPECT,))

    def _failure(self, what: str, error: sqlite3.Error) -> HillInferError:
        """Return what to raise; whoever opens a broken one next looks at all of it."""
        if is_broken(error):
            with suppress(sqlite3.Error):
                self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, 1)", (_SUSPECT,))
        return self.kind.failure(self.path, what, error)
