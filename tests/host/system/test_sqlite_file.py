# SPDX-License-Identifier: Apache-2.0
"""A database file changes whole or not at all, and its failures are of whoever owns it."""

import sqlite3

import pytest

from hillinfer.errors import HillInferError
from hillinfer.system.sqlite_file import FileKind, SqliteFile

SCHEMA = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE one(number INT);
"""


class OwnError(HillInferError):
    pass


KIND = FileKind("the list", OwnError, "remove it")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "list.sqlite"
    SqliteFile.make(KIND, path, SCHEMA, "mine", lambda db: db.execute("INSERT INTO one VALUES (7)"))
    opened = SqliteFile(KIND, path, "mine")
    yield opened
    opened.close()
    opened.close()


def insert_and_break(db):
    db.execute("INSERT INTO one VALUES (9)")
    raise sqlite3.Warning


def test_a_change_is_made_whole_or_not_at_all(file):
    assert file.path.stat().st_mode & 0o777 == 0o600
    with file.transaction() as db:
        db.execute("INSERT INTO one VALUES (8)")
    with pytest.raises(sqlite3.Warning), file.transaction() as db:
        insert_and_break(db)
    assert file.rows("SELECT number FROM one ORDER BY number") == [(7,), (8,)]
    assert file.rows("SELECT number FROM one WHERE number > ?", (7,)) == [(8,)]


def test_what_sqlite_refuses_is_the_owners_error(file, tmp_path):
    with pytest.raises(OwnError, match=r"the list .* failed: no such table: other; remove it"):
        file.rows("SELECT * FROM other")
    with pytest.raises(OwnError, match="failed: no such table"), file.transaction() as db:
        db.execute("DELETE FROM other")
    with pytest.raises(OwnError, match="cannot be used: it is another store's"):
        SqliteFile(KIND, file.path, "another")
    with pytest.raises(OwnError, match="cannot be made: near"):
        SqliteFile.make(KIND, tmp_path / "new", "CREATE nothing", "mine")
    with pytest.raises(FileExistsError):
        SqliteFile.make(KIND, file.path, SCHEMA, "mine")


def test_a_file_that_is_in_use_is_not_told_to_be_removed(file):
    file.rows("PRAGMA busy_timeout = 1")
    beside = sqlite3.connect(file.path, isolation_level=None)
    beside.execute("BEGIN EXCLUSIVE")
    with pytest.raises(OwnError, match=r"failed: database is locked$"):
        file.rows("SELECT * FROM one")
    beside.execute("ROLLBACK")
    beside.close()
    assert file.rows("SELECT * FROM one") == [(7,)]


def test_a_broken_file_is_seen_when_it_is_opened_or_checked(file):
    file.check()
    data = bytearray(file.path.read_bytes())
    data[4096:8192] = bytes(4096)
    file.path.write_bytes(data)
    with pytest.raises(OwnError, match=r"(?s)cannot be used: .*; remove it"):
        SqliteFile(KIND, file.path, "mine")


def insert_at_once(db):
    db.execute("PRAGMA busy_timeout = 0")
    db.execute("INSERT INTO one VALUES (8)")


def test_a_change_that_cannot_be_committed_keeps_nobody_out(file):
    """Somebody reads for longer than is waited: the change is undone, and the next one begins."""
    reader = sqlite3.connect(file.path)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM one").fetchall()
    with pytest.raises(OwnError, match="database is locked"), file.transaction() as db:
        insert_at_once(db)
    reader.rollback()
    with file.transaction() as db:
        db.execute("INSERT INTO one VALUES (9)")
    reader.close()
    assert file.rows("SELECT number FROM one ORDER BY number") == [(7,), (9,)]
