# SPDX-License-Identifier: Apache-2.0
"""Plans of reads: aligned, joined, inside the buffer, and every row where it belongs.

They are seen in the reads that are made, of the native library and of its twin.
"""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import SKIP, kernel_permits_rings
from hypothesis import given, settings
from hypothesis import strategies as st
from landings import (
    CONTENT_BYTES,
    FILL,
    WAYS,
    SeenReads,
    file_of,
    land,
    random_content,
    rows_of,
    wanted_rows,
)

from hillinfer.drive.files import PAGE_BYTES, IOMode, aligned_buffer, probe_io_mode, round_up
from hillinfer.drive.landing import JOIN_GAP_BYTES, MAX_READ_BYTES, FileRows

ROW_BYTES = st.sampled_from([64, 128, 192, 320, 768, 1024, 4096, 4160, 8192])


@pytest.fixture(scope="module")
def content():
    return random_content()


@pytest.fixture(scope="module")
def calls():
    return SeenReads()


@pytest.fixture(scope="module")
def file(tmp_path_factory, content, calls):
    folder = tmp_path_factory.mktemp("plans")
    made = file_of(folder, probe_io_mode(folder), content, calls)
    yield made
    made.close()


@pytest.fixture(params=WAYS)
def way(request):
    if request.param == "ring" and not kernel_permits_rings():
        pytest.skip(SKIP)
    return request.param


@st.composite
def requests(draw):
    row_bytes = draw(ROW_BYTES)
    most = min(draw(st.sampled_from([20, 300, 3000])), CONTENT_BYTES // row_bytes)
    rows = draw(st.lists(st.integers(0, most - 1), min_size=1, max_size=120, unique=True))
    if draw(st.booleans()):
        rows.sort()
    least = row_bytes + 2 * PAGE_BYTES
    buffer_bytes = draw(st.sampled_from([least, round_up(least, PAGE_BYTES), 1 << 16, 1 << 20]))
    return row_bytes, rows, max(least, buffer_bytes)


def assert_every_row_is_there(content, wanted):
    rows = rows_of(content, wanted.row_bytes)
    np.testing.assert_array_equal(wanted.out[wanted.places], rows[wanted.rows])
    others = np.ones(len(wanted.out), bool)
    others[wanted.places] = False
    assert (wanted.out[others] == FILL).all()


def test_every_row_arrives_whole_and_no_page_twice(way, file, content, calls):
    @settings(max_examples=60, deadline=None)
    @given(request=requests())
    def check(request):
        row_bytes, rows, buffer_bytes = request
        wanted = wanted_rows(rows, row_bytes, buffer_bytes)
        outcome = land(way, file, wanted, calls)
        assert_every_row_is_there(content, wanted)
        assert outcome.landed.cost.reads == len(outcome.reads)
        assert outcome.landed.cost.byte_count == sum(count for _, _, count in outcome.reads)
        pages = []
        for at, into, count in outcome.reads:
            assert at % PAGE_BYTES == into % PAGE_BYTES == count % PAGE_BYTES == 0
            assert 0 < count <= MAX_READ_BYTES
            assert 0 <= into <= into + count <= buffer_bytes
            pages += range(at // PAGE_BYTES, (at + count) // PAGE_BYTES)
        if buffer_bytes == 1 << 20:
            # All of them in one batch.
            assert len(pages) == len(set(pages))

    check()


def reads(way, file, calls, rows, row_bytes=64, buffer_bytes=1 << 20):
    outcome = land(way, file, wanted_rows(rows, row_bytes, buffer_bytes), calls)
    return sorted((at, count) for at, _, count in outcome.reads)


def test_every_byte_is_read_to_its_place_once(way, file, content, calls):
    @settings(max_examples=40, deadline=None)
    @given(data=st.data(), row_bytes=st.sampled_from([12_288, 16_384, 2 * MAX_READ_BYTES]))
    def check(data, row_bytes):
        most = min(40, CONTENT_BYTES // row_bytes)
        some = st.lists(st.integers(0, most - 1), min_size=1, unique=True)
        rows = np.array(data.draw(some), np.int64)
        places = np.array(data.draw(st.permutations(range(most))), np.int64)[: len(rows)]
        if data.draw(st.booleans()):
            rows, places = np.sort(rows), np.sort(places)
        out = aligned_buffer(most * row_bytes).reshape(most, row_bytes)
        out[:] = FILL
        wanted = FileRows(rows, out, places, np.zeros(0, np.uint8))
        outcome = land(way, file, wanted, calls)
        assert_every_row_is_there(content, wanted)
        # Every page of the memory, and the page of the file that comes there.
        came = np.full(most * row_bytes // PAGE_BYTES, -1)
        for at, into, count in outcome.reads:
            assert at % PAGE_BYTES == into % PAGE_BYTES == count % PAGE_BYTES == 0
            assert 0 < count <= MAX_READ_BYTES
            pages = np.arange(count // PAGE_BYTES)
            assert (came[into // PAGE_BYTES + pages] == -1).all()
            came[into // PAGE_BYTES + pages] = at // PAGE_BYTES + pages
        expected = np.full((most, row_bytes // PAGE_BYTES), -1)
        per_row = row_bytes // PAGE_BYTES
        expected[places] = rows[:, None] * per_row + np.arange(per_row)
        np.testing.assert_array_equal(came, expected.reshape(-1))

    check()


def test_only_neighbours_in_file_and_memory_are_read_together(way, file, calls):
    out = aligned_buffer(5 * 16_384).reshape(5, 16_384)
    wanted = FileRows(np.array([5, 6, 8, 9]), out, np.array([0, 1, 2, 4]), np.zeros(0, np.uint8))
    found = sorted(land(way, file, wanted, calls).reads)
    assert [count for _, _, count in found] == [32_768, 16_384, 16_384]


def test_rows_that_a_gap_may_join_or_that_straddle_pages_need_a_buffer():
    pages, buffer = aligned_buffer(16 * 16_384), aligned_buffer(1 << 16)

    def lie_in_pages(out):
        return FileRows(np.arange(1), out, np.arange(1), buffer).lie_in_pages

    assert lie_in_pages(pages.reshape(-1, 16_384))
    assert not lie_in_pages(pages.reshape(-1, JOIN_GAP_BYTES))
    assert not lie_in_pages(pages[: 10 * 12_352].reshape(-1, 12_352))
    assert not lie_in_pages(pages[64 : 64 + 16_384].reshape(-1, 16_384))


@pytest.mark.parametrize(
    ("out", "places", "buffer_bytes", "said"),
    [
        (np.zeros((8, 128), np.uint8)[:, :64], 1, 1 << 14, "contiguous multiples of 64"),
        (np.zeros((8, 100), np.uint8), 1, 1 << 14, "contiguous multiples of 64"),
        (np.zeros(64, np.uint8), 1, 1 << 14, "contiguous multiples of 64"),
        (np.zeros((8, 64), np.uint8), 2, 1 << 14, "1 rows do not go to 2 places"),
        (np.zeros((8, 64), np.uint8), 1, 8192, "8192 bytes does not hold a row's pages"),
    ],
)
def test_what_rows_cannot_go_to_is_refused(out, places, buffer_bytes, said):
    with pytest.raises(ValueError, match=said):
        FileRows(np.arange(1), out, np.arange(places), aligned_buffer(buffer_bytes))


@pytest.mark.parametrize(("row", "place"), [(0, 8), (0, -1), (-1, 0), (20, 0)])
def test_rows_and_places_that_are_nowhere_are_refused(file, calls, row, place):
    out, sums = np.zeros((8, 64), np.uint8), np.zeros(20, np.uint32)
    wanted = FileRows(np.array([row]), out, np.array([place]), aligned_buffer(1 << 14), sums)
    with pytest.raises(IndexError, match="no place, or no checksum"):
        land("threads", file, wanted, calls)
    assert not out.any()
    assert not calls.reads


def test_neighbours_are_one_read(way, file, calls):
    assert reads(way, file, calls, range(64)) == [(0, 4096)]
    assert reads(way, file, calls, range(300)) == [(0, 5 * 4096)]


def test_a_row_over_a_page_end_takes_both_pages(way, file, calls):
    assert reads(way, file, calls, [5], row_bytes=768) == [(0, 8192)]


@pytest.mark.parametrize(("gap", "count"), [(JOIN_GAP_BYTES, 1), (JOIN_GAP_BYTES + 4096, 2)])
def test_small_gaps_are_read_through_and_large_ones_left_out(way, file, calls, gap, count):
    assert len(reads(way, file, calls, [0, (4096 + gap) // 64])) == count


def test_long_reads_are_cut(way, file, calls):
    found = reads(way, file, calls, range(2 * MAX_READ_BYTES // 64 + 1))
    assert [count for _, count in found] == [MAX_READ_BYTES, MAX_READ_BYTES, 4096]


def test_a_small_buffer_takes_several_batches(way, file, calls):
    wanted = wanted_rows(np.arange(0, 3000, 100), 64, 64 + 2 * PAGE_BYTES)
    outcome = land(way, file, wanted, calls)
    assert sum(into == 0 for _, into, _ in outcome.reads) > 5


def test_no_rows_need_no_reads(way, file, calls):
    outcome = land(way, file, wanted_rows([], 64, 1 << 16), calls)
    assert outcome.reads == []
    assert outcome.landed.cost.reads == 0


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097])
def test_buffers_are_whole_pages_on_page_starts(count):
    buffer = aligned_buffer(count)
    assert len(buffer) % PAGE_BYTES == 0
    assert len(buffer) >= max(count, 1)
    assert buffer.ctypes.data % PAGE_BYTES == 0


def planned_anew(rows, row_bytes, buffer_bytes, gap=JOIN_GAP_BYTES, unit=PAGE_BYTES):
    """Reads of all batches, planned row by row: offset in the file, place in the buffer, bytes."""
    found, used, end = [], buffer_bytes, None
    for row in sorted(rows.tolist()):
        start = row * row_bytes // unit * unit
        stop = -(-(row + 1) * row_bytes // unit) * unit
        if end is not None and start <= end + gap and used + stop - end <= buffer_bytes:
            found[-1][2] += stop - end
            used += stop - end
        elif end is not None and start > end + gap and used + stop - start <= buffer_bytes:
            found.append([start, used, stop - start])
            used += stop - start
        else:
            found.append([start, 0, stop - start])
            used = stop - start
        end = stop
    return [tuple(one) for one in found]


@pytest.mark.parametrize("row_bytes", [64, 768, 4096, 5120])
def test_all_batches_are_those_of_a_plan_row_by_row(way, file, calls, row_bytes):
    seen = 0
    for seed in range(8, 15):
        generator = np.random.default_rng(seed)
        most = min(3000, CONTENT_BYTES // row_bytes)
        count = int(generator.integers(1, min(400, most)))
        rows = generator.choice(most, count, replace=False)
        buffer_bytes = row_bytes + int(generator.integers(2, 40)) * PAGE_BYTES
        found = land(way, file, wanted_rows(rows, row_bytes, buffer_bytes), calls).reads
        in_order = sorted if way == "ring" else list
        assert in_order(found) == in_order(planned_anew(rows, row_bytes, buffer_bytes))
        other = planned_anew(rows, row_bytes, buffer_bytes, JOIN_GAP_BYTES - PAGE_BYTES)
        seen += in_order(found) != in_order(other)
    assert seen


# --- Units smaller than a page ---


@pytest.fixture(scope="module")
def in_cache(tmp_path_factory, content, calls):
    """A file that any file system reads in any unit: through the page cache."""
    made = file_of(tmp_path_factory.mktemp("units"), IOMode.BUFFERED, content, calls)
    yield made
    made.close()


@pytest.mark.parametrize("row_bytes", [64, 128, 768, 5120])
@pytest.mark.parametrize("unit", [512, 1024])
def test_reads_are_of_whole_units_of_the_file(way, in_cache, content, calls, row_bytes, unit):
    seen = 0
    for seed in range(5):
        generator = np.random.default_rng(seed)
        most = min(3000, CONTENT_BYTES // row_bytes)
        rows = generator.choice(most, int(generator.integers(1, min(400, most))), replace=False)
        buffer_bytes = row_bytes + int(generator.integers(2, 40)) * PAGE_BYTES
        wanted = replace(wanted_rows(rows, row_bytes, buffer_bytes), unit_bytes=unit)
        outcome = land(way, in_cache, wanted, calls)
        assert_every_row_is_there(content, wanted)
        in_order = sorted if way == "ring" else list
        expected = planned_anew(rows, row_bytes, buffer_bytes, unit=unit)
        assert in_order(outcome.reads) == in_order(expected)
        whole = planned_anew(rows, row_bytes, buffer_bytes)
        seen += sum(count for *_, count in expected) < sum(count for *_, count in whole)
    assert seen


def test_a_unit_of_nothing_is_refused(in_cache, calls):
    with pytest.raises(IndexError):
        land("threads", in_cache, replace(wanted_rows([1], 64, 1 << 16), unit_bytes=0), calls)


def test_a_direct_file_is_read_in_the_unit_that_its_file_system_says(file, content):
    unit = file.read_unit
    assert unit & (unit - 1) == 0
    assert PAGE_BYTES % unit == 0
    into = aligned_buffer(PAGE_BYTES)[:unit]
    file.read(into.data, unit)
    np.testing.assert_array_equal(into, content[unit : 2 * unit])


def test_a_file_in_the_page_cache_is_read_in_pages(in_cache):
    assert in_cache.read_unit == PAGE_BYTES
