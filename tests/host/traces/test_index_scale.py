# SPDX-License-Identifier: Apache-2.0
"""The product's index takes copies of a trace: as many rows as chunks have, found and evicted."""

from hillinfer_bench.traces.index_rebuild import measure_rebuild
from hillinfer_bench.traces.index_scale import CHUNK_GROUPS, index_rows, keys_of, reckoned_index
from hillinfer_bench.traces.request_trace import Request, RequestTrace

# Ten conversations of ten turns, each two blocks longer than the one before it.
REQUESTS = tuple(
    Request(float(number), 1024 * turn, tuple(range(20 * number, 20 * number + 2 * turn)))
    for turn in range(1, 11)
    for number in range(10)
)
TRACE = RequestTrace("made", REQUESTS, 200)


def test_an_index_holds_what_it_has_room_for(tmp_path):
    written = []
    rows = index_rows(tmp_path / "store", TRACE, 300, written.append)
    last = rows[-1]
    assert last.chunks == 301
    assert last.rows == last.chunks * (1 + CHUNK_GROUPS)
    assert last.evicted > 0
    assert written == sorted(written)
    assert 500 < last.bytes_per_chunk < 5000
    assert not (tmp_path / "store").exists()
    reckoned = reckoned_index(rows)
    assert 6e6 < reckoned.chunks < 8e6


def test_blocks_of_other_copies_have_other_keys():
    first, other = (Request(0.0, 1024, blocks) for blocks in ((0, 1), (200, 201)))
    assert len(set(keys_of(first)) | set(keys_of(other))) == 2 * CHUNK_GROUPS
    longer = Request(0.0, 2048, (0, 1, 2, 3))
    assert keys_of(longer)[:CHUNK_GROUPS] == keys_of(first)
    # The last chunk is not whole.
    assert keys_of(Request(0.0, 2047, (0, 1, 2, 3))) == keys_of(first)


def test_an_index_is_made_anew_from_all_its_headers(tmp_path):
    row = measure_rebuild(tmp_path / "store", 300)
    assert row.chunks == 300
    assert row.seconds_per_terabyte > 0
    assert not (tmp_path / "store").exists()
