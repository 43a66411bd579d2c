# SPDX-License-Identifier: Apache-2.0
"""Rows of sealed files land as those of plain ones do, by the same reads, or are told as wrong."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import SKIP, kernel_permits_rings
from faulty_calls import FAULTS, Fault, FaultyCalls, Injection, WithoutNativeReads
from landings import CONTENT_BYTES, WAYS, SeenReads, file_of, land, random_content, rows_of
from landings import wanted_rows as plain_rows
from test_landing import CASES, flip, some

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import aligned_buffer, probe_io_mode
from hillinfer.memory_budget import Accountant
from hillinfer.secrecy.cold_pages import PoolKey

PAGE = 4096


@pytest.fixture(params=[way for way in WAYS if way != "twin"])
def way(request):
    if request.param == "ring" and not kernel_permits_rings():
        pytest.skip(SKIP)
    return request.param


@pytest.fixture(scope="module")
def content():
    return random_content()


@pytest.fixture
def sealed(tmp_path, content):
    """A sealed file with its pages, and the calls that see its reads."""
    pages = PoolKey(Accountant(1 << 20)).file()
    pages.cover(CONTENT_BYTES)
    data = aligned_buffer(CONTENT_BYTES)
    data[:] = content
    pages.seal(0, data)
    file = file_of(tmp_path, probe_io_mode(tmp_path), data, SeenReads(), pages)
    yield file
    file.close()


def wanted_rows(file, rows, row_bytes, buffer_bytes):
    """Return rows that nobody has checksums of: what is wrong is known by tags alone.

    Sealed pages come whole, whatever unit their file is read in.
    """
    plain = plain_rows(rows, row_bytes, buffer_bytes)
    return replace(plain, seals=file.pages.seals, unit_bytes=512)


@pytest.mark.parametrize("name", CASES)
def test_rows_and_reads_are_those_of_a_plain_file(way, sealed, tmp_path, content, name):
    row_bytes, rows, buffer_bytes = CASES[name]
    plain = file_of(tmp_path, probe_io_mode(tmp_path), content, sealed.seen)
    right = land(way, plain, plain_rows(rows, row_bytes, buffer_bytes), sealed.seen)
    found = land(way, sealed, wanted_rows(sealed, rows, row_bytes, buffer_bytes), sealed.seen)
    plain.close()
    np.testing.assert_array_equal(found.out, right.out)
    assert found.landed == right.landed
    assert sorted(found.reads) == sorted(right.reads)
    assert found.landed.wrong is None
    # The twin: without what opens them they are other bytes.
    other = land(way, sealed, plain_rows(rows, row_bytes, buffer_bytes), sealed.seen)
    places = plain_rows(rows, row_bytes, buffer_bytes).places
    assert (other.out[places] != right.out[places]).mean() > 0.9


@pytest.mark.parametrize("name", CASES)
def test_pages_are_opened_by_whoever_reads_them(way, sealed, content, name):
    """As above, where nobody watches: reads are opened while others are under way."""
    row_bytes, rows, buffer_bytes = CASES[name]
    wanted = wanted_rows(sealed, rows, row_bytes, buffer_bytes)
    engine = type(WAYS[way](DriveCalls()))(8, DriveCalls())
    landed = engine.land(sealed, wanted)
    engine.close()
    assert landed.wrong is None
    np.testing.assert_array_equal(wanted.out[wanted.places], rows_of(content, row_bytes)[rows])


@pytest.mark.parametrize("name", CASES)
def test_a_flipped_bit_is_told_of_the_first_row_of_its_page(way, sealed, content, name):
    row_bytes, rows, buffer_bytes = CASES[name]
    at = int(rows[len(rows) // 2]) * row_bytes + row_bytes - 1
    flip(sealed, sealed.bytes, at)
    begins, ends = rows * row_bytes // PAGE, (rows * row_bytes + row_bytes - 1) // PAGE
    first = int(np.flatnonzero((begins <= at // PAGE) & (ends >= at // PAGE))[0])
    found = land(way, sealed, wanted_rows(sealed, rows, row_bytes, buffer_bytes), sealed.seen)
    assert found.landed.wrong == first


def test_pages_in_between_that_nobody_wants_need_not_open(way, sealed, content):
    """They are read because they are there, and may be written meanwhile."""
    rows = np.array([0, 12])
    flip(sealed, sealed.bytes, 5 * 1024)
    found = land(way, sealed, wanted_rows(sealed, rows, 1024, 1 << 16), sealed.seen)
    assert len(found.reads) == 1
    assert found.landed.wrong is None


def test_a_row_without_a_tag_has_no_place(way, sealed):
    rows = np.array([CONTENT_BYTES // 1024])
    with pytest.raises(IndexError):
        land(way, sealed, wanted_rows(sealed, rows, 1024, 1 << 16), sealed.seen)


@pytest.mark.parametrize("row_bytes", [1024, 16_384])
@pytest.mark.parametrize(
    ("kind", "index", "fault"),
    [("read_done", 0, Fault.EIO), ("read_done", 5, Fault.SHORT)]
    + [("land", 0, fault) for fault in FAULTS["land"]],
)
def test_what_is_read_again_is_opened_once(way, sealed, content, row_bytes, kind, index, fault):
    calls = FaultyCalls(Injection(kind, index, fault), delay_seconds=0.001)
    rows = some(11, 60, CONTENT_BYTES // row_bytes)
    wanted = wanted_rows(sealed, rows, row_bytes, 1 << 16)
    engine = WAYS[way](calls)
    landed = engine.land(sealed, wanted)
    engine.close()
    assert calls.hits >= 1
    assert landed.wrong is None
    np.testing.assert_array_equal(wanted.out[wanted.places], rows_of(content, row_bytes)[rows])


def test_where_nothing_comes_natively_all_is_opened(way, sealed, content):
    rows = some(12, 100, 3000)
    wanted = wanted_rows(sealed, rows, 1024, 1 << 16)
    engine = WAYS[way](WithoutNativeReads())
    landed = engine.land(sealed, wanted)
    engine.close()
    assert landed.wrong is None
    np.testing.assert_array_equal(wanted.out[wanted.places], rows_of(content, 1024)[rows])
