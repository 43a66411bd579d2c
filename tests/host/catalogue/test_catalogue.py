# SPDX-License-Identifier: Apache-2.0
"""What a catalogue is told, it says again: in another process, whole, and for its owner only."""

import os
import stat
import threading
from dataclasses import replace

import pytest

from hillinfer.catalogue.catalogue import FILE, Catalogue
from hillinfer.catalogue.records import (
    CatalogueError,
    KnownDocument,
    MeasuredForm,
    RestingTimes,
)
from hillinfer.secrecy.key_sources import KeyFile
from hillinfer.store.pool_files import StorePlaces

INT4 = MeasuredForm("int4", 280, 0.96, 0.9, 0.93, 0.02, 0.1, 0.01, 0.95)
HELD = MeasuredForm("held", 1000, 1.0, 1.0, 1.0, 0.0, 0.05, 0.01)
BOOK = KnownDocument(
    b"\x0a" * 32, "book.txt", "tiny", b"n" * 32, 256, 5.0, RestingTimes(4, 1, 0.01)
)
OTHER = replace(BOOK, key=b"\x0b" * 32, title="other.txt", put_at=6.0, resting=None)


@pytest.fixture
def places(tmp_path):
    StorePlaces.create(tmp_path / "store", 64 << 20, [])
    return StorePlaces.read(tmp_path / "store")


def test_what_was_put_is_there_when_it_is_opened_again(places):
    with Catalogue(places) as catalogue:
        assert catalogue.documents() == []
        catalogue.put(replace(BOOK, measured=(INT4, HELD)))
        catalogue.put(OTHER)
    with Catalogue(places) as catalogue:
        assert catalogue.documents() == [OTHER, replace(BOOK, measured=(INT4, HELD))]
        for name in ("0a0a", "0A", "book.txt", BOOK.key.hex()):
            assert catalogue.find(name).title == "book.txt"
        catalogue.remove(BOOK.key)
        assert catalogue.documents() == [OTHER]
        with pytest.raises(CatalogueError, match=r"no document is called 'book\.txt'"):
            catalogue.find("book.txt")


def test_names_that_say_nothing_or_too_much_are_refused(places):
    with Catalogue(places) as catalogue:
        catalogue.put(BOOK)
        catalogue.put(OTHER)
        with pytest.raises(CatalogueError, match="2 documents are called '0': hillinfer doc"):
            catalogue.find("0")
        for name in ("", "ff", "0a" * 33, "book"):
            with pytest.raises(CatalogueError, match="no document is called"):
                catalogue.find(name)


def test_newer_measurements_replace_older_ones_and_leave_the_form(places):
    with Catalogue(places) as catalogue:
        catalogue.put(replace(BOOK, measured=(INT4, HELD)))
        catalogue.pin(BOOK.key, "int4")
        better = replace(INT4, lower=0.99)
        catalogue.put(replace(BOOK, title="", resting=None, measured=(better,)))
        found = catalogue.find("0a")
        assert found.measured == (better, HELD)
        assert (found.form, found.is_pinned) == ("int4", True)
        # What is not known anew stays.
        assert (found.title, found.resting) == ("book.txt", BOOK.resting)


def test_plans_leave_what_is_pinned(places):
    with Catalogue(places) as catalogue:
        catalogue.put(BOOK)
        catalogue.put(OTHER)
        catalogue.pin(BOOK.key, "int4")
        catalogue.set_forms([(BOOK.key, "held"), (OTHER.key, "held")])
        assert [one.form for one in catalogue.documents()] == ["held", "int4"]
        catalogue.unpin(BOOK.key)
        catalogue.set_forms([(BOOK.key, "held")])
        assert [one.form for one in catalogue.documents()] == ["held", "held"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_its_files_are_its_owners(places, umask):
    before = os.umask(umask)
    try:
        with Catalogue(places) as catalogue:
            catalogue.put(BOOK)
    finally:
        os.umask(before)
    files = [one for one in places.directory.iterdir() if one.name.startswith("documents")]
    assert [one.name for one in files] == [FILE]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600


def test_an_encrypted_store_keeps_no_titles(tmp_path):
    StorePlaces.create(tmp_path / "store", 64 << 20, [], KeyFile(tmp_path / "key"))
    places = StorePlaces.read(tmp_path / "store")
    with Catalogue(places) as catalogue:
        catalogue.put(BOOK)
        assert catalogue.find("0a").title == ""
    assert b"book.txt" not in (places.directory / FILE).read_bytes()


def test_a_document_that_another_process_forgot_is_not_told_to_be_pinned(places):
    with Catalogue(places) as catalogue, Catalogue(places) as other:
        catalogue.put(BOOK)
        catalogue.pin(BOOK.key, "rows")
        other.remove(BOOK.key)
        for change in (lambda: catalogue.pin(BOOK.key, "int4"), lambda: catalogue.unpin(BOOK.key)):
            with pytest.raises(CatalogueError, match="was forgotten meanwhile"):
                change()
        assert other.documents() == []


def test_a_title_that_is_no_text_is_kept_as_it_is_shown(places):
    """Names of files are bytes, of any coding."""
    title = os.fsdecode(b"caf\xe9.txt")
    with Catalogue(places) as catalogue:
        catalogue.put(replace(BOOK, title=title))
        found = catalogue.find(title)
        assert found.title == "caf\\udce9.txt"
        assert catalogue.find(found.title) == found
        with pytest.raises(CatalogueError, match="no document is called") as refused:
            catalogue.find(title[:-1])
    str(refused.value).encode()


def test_what_is_no_catalogue_of_this_store_is_refused(places, tmp_path):
    Catalogue(places).close()
    StorePlaces.create(tmp_path / "second", 64 << 20, [])
    second = StorePlaces.read(tmp_path / "second")
    (places.directory / FILE).rename(second.directory / FILE)
    with pytest.raises(CatalogueError, match="it is another store's"):
        Catalogue(second)
    for data in (b"no database", b"", b"SQLite format 3\x00" + bytes(200)):
        (places.directory / FILE).write_bytes(data)
        with pytest.raises(CatalogueError, match=r"cannot be used: .*; remove it: it is made anew"):
            Catalogue(places)
    (places.directory / FILE).unlink()
    with Catalogue(places) as catalogue:
        assert catalogue.documents() == []
    (places.directory / FILE).unlink()
    (places.directory / FILE).mkdir()
    with pytest.raises(CatalogueError, match="cannot be used"):
        Catalogue(places)


def test_many_make_and_change_it_at_once(places):
    def change(number):
        with Catalogue(places) as catalogue:
            catalogue.put(replace(BOOK, key=bytes([number]) * 32, title=f"d{number}"))

    threads = [threading.Thread(target=change, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    with Catalogue(places) as catalogue:
        assert {one.title for one in catalogue.documents()} == {f"d{n}" for n in range(8)}
    assert list(places.directory.glob("*.part")) == []
