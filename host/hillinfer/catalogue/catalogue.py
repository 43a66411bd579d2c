# SPDX-License-Identifier: Apache-2.0
"""The catalogue beside a store: its documents, what was measured of them, and what they lie as.

It is a database of its own. A store's index is made anew from what its drives hold, and nothing on
them says what is known here; without a catalogue the store is as it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hillinfer.catalogue.records import (
    NAME_DIGITS,
    CatalogueError,
    KnownDocument,
    MeasuredForm,
    RestingTimes,
)
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import keep_names
from hillinfer.errors import reason_of, way_out
from hillinfer.store.pool_files import StorePlaces
from hillinfer.system.sqlite_file import FileKind, SqliteFile

FILE = "documents.sqlite"
_VERSION = 1
_SCHEMA = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE document(
  key BLOB PRIMARY KEY, title TEXT, model TEXT, namespace BLOB, tokens INT, put_at REAL,
  text_seconds REAL, rows_seconds REAL, token_seconds REAL, form TEXT, is_pinned INT)
  WITHOUT ROWID;
CREATE TABLE measured(
  key BLOB, form TEXT, byte_count INT, agreement REAL, worst REAL, lower REAL, divergence REAL,
  opening_seconds REAL, token_seconds REAL, judged REAL, PRIMARY KEY(key, form)) WITHOUT ROWID;
"""
_DOCUMENT = (
    "key, title, model, namespace, tokens, put_at, text_seconds, rows_seconds, token_seconds, "
    "form, is_pinned"
)
_MEASURED = (
    "form, byte_count, agreement, worst, lower, divergence, opening_seconds, token_seconds, judged"
)
_KIND = FileKind(
    "the catalogue",
    CatalogueError,
    "remove it: it is made anew, forms are measured again, and no stored row is lost",
)


class Catalogue:
    """The documents of one store; the only one that reads or writes its file.

    Any thread may use it, and any number of processes may have it open: each change is made whole
    or not at all.

    Parameters
    ----------
    places
        Of the store. The file is made where it is missing, for its owner only.

    Raises
    ------
    CatalogueError
        Where the file cannot be made, is broken, or is another store's or version's.
    """

    def __init__(self, places: StorePlaces) -> None:
        self._path = places.directory / FILE
        self._keeps_titles = not places.cipher
        identity = f"{_VERSION}:{places.pool.hex()}"
        if not self._path.exists():
            self._make(identity)
        # All of it is looked at: it has a few hundred bytes for each document.
        self._file = SqliteFile(_KIND, self._path, identity)

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        self._file.close()

    def __enter__(self) -> Catalogue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- looking ---------------------------------------------------------------------------

    def documents(self) -> list[KnownDocument]:
        """Return all documents, those that came last first."""
        forms: dict[bytes, list[MeasuredForm]] = {}
        for key, *values in self._file.rows(
            f"SELECT key, {_MEASURED} FROM measured ORDER BY byte_count, form"
        ):
            forms.setdefault(key, []).append(MeasuredForm(*values))
        return [
            _document(row, tuple(forms.get(row[0], ())))
            for row in self._file.rows(
                f"SELECT {_DOCUMENT} FROM document ORDER BY put_at DESC, key"
            )
        ]

    def find(self, name: str) -> KnownDocument:
        """Return the document of a name: the first digits of its key, or its whole title.

        Raises
        ------
        CatalogueError
            Where none is called so, or several are.
        """
        known, title = self.documents(), _kept(name)
        found = [one for one in known if one.title == title and title]
        if not found:
            wanted = name.lower()
            found = [one for one in known if wanted and one.key.hex().startswith(wanted)]
        if len(found) != 1:
            what = f"{len(found)} documents are" if found else "no document is"
            raise CatalogueError(
                f"{what} called '{title}': hillinfer documents ls names all {NAME_DIGITS} digits "
                "of each, and hillinfer documents put adds one"
            )
        return found[0]

    # --- changing --------------------------------------------------------------------------

    def put(self, document: KnownDocument) -> None:
        """Take in a document, or what is newly known of one; its form and pin stay as they are.

        An encrypted store's catalogue is not encrypted: it keeps no titles.
        """
        title = _kept(document.title) if self._keeps_titles else ""
        times = document.resting
        seconds = (None, None, None) if times is None else (times.text, times.rows, times.token)
        values = (
            document.key, title, document.model, document.namespace, document.tokens,
            document.put_at, *seconds, document.form, document.is_pinned,
        )  # fmt: skip
        with self._file.transaction() as db:
            db.execute(
                f"INSERT INTO document({_DOCUMENT}) VALUES ({', '.join('?' * len(values))}) "
                "ON CONFLICT(key) DO UPDATE SET title = iif(excluded.title = '', title, "
                "excluded.title), model = excluded.model, "
                "text_seconds = coalesce(excluded.text_seconds, text_seconds), "
                "rows_seconds = coalesce(excluded.rows_seconds, rows_seconds), "
                "token_seconds = coalesce(excluded.token_seconds, token_seconds)",
                values,
            )
            for one in document.measured:
                told = (
                    document.key, one.form, one.byte_count, one.agreement, one.worst, one.lower,
                    one.divergence, one.opening_seconds, one.token_seconds, one.judged,
                )  # fmt: skip
                db.execute(
                    f"INSERT OR REPLACE INTO measured(key, {_MEASURED}) "
                    f"VALUES ({', '.join('?' * len(told))})",
                    told,
                )

    def set_forms(self, forms: Sequence[tuple[bytes, str]]) -> None:
        """Say what documents shall lie as, all at one moment; pinned ones stay.

        Parameters
        ----------
        forms
            Keys, and names of forms.
        """
        with self._file.transaction() as db:
            db.executemany(
                "UPDATE document SET form = ?2 WHERE key = ?1 AND is_pinned = 0", list(forms)
            )

    def pin(self, key: bytes, form: str) -> None:
        """Have a document lie as a form until it is unpinned.

        Raises
        ------
        CatalogueError
            Where it was forgotten meanwhile, by another process.
        """
        self._change("UPDATE document SET is_pinned = 1, form = ?2 WHERE key = ?1", key, form)

    def unpin(self, key: bytes) -> None:
        """Leave a document to plans again; its form stays until the next one. As `pin`."""
        self._change("UPDATE document SET is_pinned = 0 WHERE key = ?1", key)

    def remove(self, key: bytes) -> None:
        """Forget a document; its stored rows stay."""
        with self._file.transaction() as db:
            for table in ("document", "measured"):
                db.execute(f"DELETE FROM {table} WHERE key = ?", (key,))

    # --- inside ----------------------------------------------------------------------------

    def _make(self, identity: str) -> None:
        scratch = self._path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            try:
                SqliteFile.make(_KIND, scratch, _SCHEMA, identity)
                # Of two processes that make it at once the first one's stays.
                with suppress(FileExistsError):
                    os.link(scratch, self._path)
                    keep_names(self._path.parent, DriveCalls())
            finally:
                scratch.unlink(missing_ok=True)
        except OSError as error:
            raise CatalogueError(
                f"the catalogue {self._path} cannot be made: {reason_of(error)}; "
                f"{way_out(error, 'choose another --store')}"
            ) from error

    def _change(self, statement: str, key: bytes, *values: str) -> None:
        """Change one document, which must be there."""
        with self._file.transaction() as db:
            if not db.execute(statement, (key, *values)).rowcount:
                raise CatalogueError(
                    f"the document {key.hex()[:NAME_DIGITS]} was forgotten meanwhile: hillinfer "
                    "documents put adds it"
                )


def _kept(title: str) -> str:
    """Return a title as a database takes it: file names may have bytes that are no characters."""
    return title.encode(errors="backslashreplace").decode()


def _document(row: Sequence[Any], measured: tuple[MeasuredForm, ...]) -> KnownDocument:
    key, title, model, namespace, tokens, put_at, *times, form, is_pinned = row
    resting = None if None in times else RestingTimes(*times)
    return KnownDocument(
        key, title, model, namespace, tokens, put_at, resting, form, bool(is_pinned), measured
    )
