# SPDX-License-Identifier: Apache-2.0
"""Plans of reads: aligned, joined, inside the buffer, and every row where the plan says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.storage.read_plan import JOIN_GAP_BYTES, MAX_READ_BYTES, plan_reads

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
