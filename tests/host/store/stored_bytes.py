# SPDX-License-Identifier: Apache-2.0
"""Changes bytes of a store's files as a failing drive would."""

import sqlite3
from contextlib import closing


def flip(path, offset, bit=0):
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def tangle(index, name="branches"):
    """Damage all entries of an index of an SQLite file in a way that its quick check passes over.

    It is a single page, as that of a few prompts.
    """
    with closing(sqlite3.connect(index)) as db:
        ((page,),) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,))
        ((size,),) = db.execute("PRAGMA page_size")
        assert db.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    with index.open("r+b") as file:
        file.seek((page - 1) * size)
        content = bytearray(file.read(size))
        # A leaf of an index: a head of 8 bytes with the number of entries, then where each begins.
        assert content[0] == 10
        for at in range(int.from_bytes(content[3:5])):
            place = int.from_bytes(content[8 + 2 * at : 10 + 2 * at])
            # Behind the length of an entry that of its own head: longer than all of it.
            content[place + 1] = 0x7F
        file.seek((page - 1) * size)
        file.write(content)
    with closing(sqlite3.connect(index)) as db:
        assert db.execute("PRAGMA quick_check").fetchall() == [("ok",)]
