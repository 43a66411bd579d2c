# SPDX-License-Identifier: Apache-2.0
"""Plans of reads: aligned, joined, inside the buffer, and every row where the plan says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.drive.read_plan import (
    JOIN_GAP_BYTES,
    MAX_READ_BYTES,
    lie_in_pages,
    plan_in_place,
    plan_reads,
)

ROW_BYTES = st.sampled_from([64, 128, 192, 320, 768, 1024, 4096, 4160, 8192])


def a_file(row_bytes, rows):
    """Return bytes in which every row differs, up to a page end."""
    size = round_up(rows * row_bytes, PAGE_BYTES)
    return np.random.default_rng(row_bytes).integers(0, 256, size, np.uint8)


@st.composite
def requests(draw):
    row_bytes = draw(ROW_BYTES)
    most = draw(st.sampled_from([20, 300, 3000]))
    rows = draw(st.lists(st.integers(0, most - 1), min_size=1, max_size=120, unique=True))
    if draw(st.booleans()):
        rows.sort()
    least = row_bytes + 2 * PAGE_BYTES
    buffer_bytes = draw(st.sampled_from([least, round_up(least, PAGE_BYTES), 1 << 16, 1 << 20]))
    return row_bytes, most, np.array(rows, np.int64), max(least, buffer_bytes)


@settings(max_examples=80, deadline=None)
@given(request=requests())
def test_every_row_arrives_once_and_whole(request):
    row_bytes, most, rows, buffer_bytes = request
    file = a_file(row_bytes, most)
    arrived = np.zeros(len(rows), int)
    for batch in plan_reads(rows, row_bytes, buffer_bytes):
        buffer = np.zeros(buffer_bytes, np.uint8)
        end_before = 0
        for at, into, count in zip(
            batch.file_offsets, batch.buffer_offsets, batch.byte_counts, strict=True
        ):
            assert at % PAGE_BYTES == into % PAGE_BYTES == count % PAGE_BYTES == 0
            assert 0 < count <= MAX_READ_BYTES
            # Reads lie one behind the other in the buffer and never past its end.
            assert into == end_before
            end_before = into + count
            assert end_before <= buffer_bytes
            assert at + count <= len(file)
            buffer[into : into + count] = file[at : at + count]
        # No page is read twice in a batch.
        pages = [
            page
            for at, count in zip(batch.file_offsets, batch.byte_counts, strict=True)
            for page in range(at // PAGE_BYTES, (at + count) // PAGE_BYTES)
        ]
        assert len(pages) == len(set(pages))
        for wanted, start in zip(batch.wanted, batch.row_offsets, strict=True):
            arrived[wanted] += 1
            assert start % 64 == 0
            row = rows[wanted]
            np.testing.assert_array_equal(
                buffer[start : start + row_bytes],
                file[row * row_bytes : (row + 1) * row_bytes],
            )
    assert (arrived == 1).all()


def reads(rows, row_bytes=64, buffer_bytes=1 << 20):
    batches = list(plan_reads(np.array(rows, np.int64), row_bytes, buffer_bytes))
    return [
        (int(at), int(count))
        for batch in batches
        for at, count in zip(batch.file_offsets, batch.byte_counts, strict=True)
    ]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), row_bytes=st.sampled_from([4096, 12_288, 16_384, 2 * MAX_READ_BYTES]))
def test_every_byte_is_read_to_its_place_once(data, row_bytes):
    most = 40
    rows = np.array(
        data.draw(st.lists(st.integers(0, most - 1), min_size=1, unique=True)), np.int64
    )
    places = np.array(data.draw(st.permutations(range(most))), np.int64)[: len(rows)]
    if data.draw(st.booleans()):
        rows, places = np.sort(rows), np.sort(places)
    found = plan_in_place(rows, places, row_bytes)
    # Every page of the buffer, and the page of the file that comes there.
    came = np.full(most * row_bytes // PAGE_BYTES, -1)
    for at, into, count in zip(
        found.file_offsets, found.buffer_offsets, found.byte_counts, strict=True
    ):
        assert at % PAGE_BYTES == into % PAGE_BYTES == count % PAGE_BYTES == 0
        assert 0 < count <= MAX_READ_BYTES
        pages = np.arange(count // PAGE_BYTES)
        assert (came[into // PAGE_BYTES + pages] == -1).all()
        came[into // PAGE_BYTES + pages] = at // PAGE_BYTES + pages
    expected = np.full((most, row_bytes // PAGE_BYTES), -1)
    per_row = row_bytes // PAGE_BYTES
    expected[places] = rows[:, None] * per_row + np.arange(per_row)
    np.testing.assert_array_equal(came, expected.reshape(-1))


def test_only_neighbours_in_file_and_memory_are_read_together():
    found = plan_in_place(np.array([5, 6, 8, 9]), np.array([0, 1, 2, 4]), 16_384)
    assert found.byte_counts.tolist() == [32_768, 16_384, 16_384]


def test_rows_that_a_gap_may_join_or_that_straddle_pages_need_a_buffer():
    pages = aligned_buffer(16 * 16_384)
    assert lie_in_pages(pages.reshape(-1, 16_384))
    assert not lie_in_pages(pages.reshape(-1, JOIN_GAP_BYTES))
    assert not lie_in_pages(pages[: 10 * 12_352].reshape(-1, 12_352))
    assert not lie_in_pages(pages[64 : 64 + 16_384].reshape(-1, 16_384))
    assert not lie_in_pages(pages.reshape(8, -1)[:, :16_384])


def test_neighbours_are_one_read():
    assert reads(range(64)) == [(0, 4096)]
    assert reads(range(300)) == [(0, 5 * 4096)]


def test_a_row_over_a_page_end_takes_both_pages():
    assert reads([5], row_bytes=768) == [(0, 8192)]


@pytest.mark.parametrize(("gap", "count"), [(JOIN_GAP_BYTES, 1), (JOIN_GAP_BYTES + 4096, 2)])
def test_small_gaps_are_read_through_and_large_ones_left_out(gap, count):
    assert len(reads([0, (4096 + gap) // 64])) == count


def test_long_reads_are_cut():
    found = reads(range(2 * MAX_READ_BYTES // 64 + 1))
    assert [count for _, count in found] == [MAX_READ_BYTES, MAX_READ_BYTES, 4096]


def test_a_small_buffer_takes_several_batches():
    rows = np.arange(0, 3000, 100)
    batches = list(plan_reads(rows, 64, 64 + 2 * PAGE_BYTES))
    assert len(batches) > 5
    assert sum(len(batch.wanted) for batch in batches) == len(rows)


def test_no_rows_need_no_reads():
    assert list(plan_reads(np.empty(0, np.int64), 64, 1 << 16)) == []


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097])
def test_buffers_are_whole_pages_on_page_starts(count):
    buffer = aligned_buffer(count)
    assert len(buffer) % PAGE_BYTES == 0
    assert len(buffer) >= max(count, 1)
    assert buffer.ctypes.data % PAGE_BYTES == 0


def planned_anew(rows, row_bytes, buffer_bytes, gap=JOIN_GAP_BYTES):
    """Files and sizes of each batch, planned row by row."""
    batches, used = [], buffer_bytes
    for row in sorted(rows.tolist()):
        start = row * row_bytes // PAGE_BYTES * PAGE_BYTES
        end = -(-(row + 1) * row_bytes // PAGE_BYTES) * PAGE_BYTES
        if batches and start <= batches[-1][-1][1] + gap:
            grown = end - batches[-1][-1][1]
            if used + grown <= buffer_bytes:
                batches[-1][-1][1], used = end, used + grown
                continue
        elif batches and used + end - start <= buffer_bytes:
            batches[-1].append([start, end])
            used += end - start
            continue
        batches.append([[start, end]])
        used = end - start
    return batches


@pytest.mark.parametrize("row_bytes", [64, 768, 4096, 5120])
def test_all_batches_are_those_of_a_plan_row_by_row(row_bytes):
    seen = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)
        rows = generator.choice(3000, int(generator.integers(1, 400)), replace=False)
        buffer_bytes = row_bytes + int(generator.integers(2, 40)) * PAGE_BYTES
        found = [
            np.stack([one.file_offsets, one.file_offsets + one.byte_counts], axis=1).tolist()
            for one in plan_reads(rows, row_bytes, buffer_bytes)
        ]
        assert found == planned_anew(rows, row_bytes, buffer_bytes)
        seen += found != planned_anew(rows, row_bytes, buffer_bytes, JOIN_GAP_BYTES - PAGE_BYTES)
    assert seen
