# SPDX-License-Identifier: Apache-2.0
"""Pieces of fetches: as many ahead as there is room for, those of the layer that attends first."""

import numpy as np
import pytest

from hillinfer_bench.rivals.drive_rows import Landing, piece_counts, piece_units
from hillinfer_bench.rivals.pooled_rows import Fetched, FetchThread
from hillinfer_bench.rivals.rival import Meter

ROW_BYTES = 4096
PIECE_ROWS = 1024
PIECE_BYTES = PIECE_ROWS * ROW_BYTES
NOTHING = np.zeros((0, ROW_BYTES), np.uint8)


def landing(ahead_pieces, meter=None):
    return Landing(
        meter or Meter(None),
        ahead_pieces * PIECE_ROWS,
        2,
        10 * PIECE_ROWS,
        1,
        ROW_BYTES,
        PIECE_BYTES,
    )


def source(noted, name, pieces):
    """Write the piece's number into its memory, and note who was worked on."""

    def made(memory):
        for number in range(pieces):
            noted.append((name, number))
            out = next(memory)
            out[...] = number
            none = np.zeros(0, np.int64)
            yield Fetched(none, NOTHING, none, out, number == pieces - 1)

    return made


def numbers(thread, fetch):
    found = []
    for piece in thread.pieces(fetch):
        assert (piece.read == piece.read[0, 0]).all()
        found.append(int(piece.read[0, 0]))
    return found


@pytest.fixture
def thread():
    made = FetchThread(landing(3))
    yield made
    made.close()


def test_all_that_has_room_is_read_ahead_and_the_rest_when_it_attends(thread):
    noted = []
    fetch = thread.start(source(noted, "next", 9))
    thread.wait()
    assert noted == [("next", number) for number in range(3)]
    assert numbers(thread, fetch) == [*range(9)]


def test_the_layer_that_attends_goes_before_a_later_one(thread):
    noted = []
    later = thread.start(source(noted, "later", 9))
    thread.wait()
    own = thread.start(source(noted, "own", 4))
    assert numbers(thread, own) == [*range(4)]
    thread.wait()
    # All room for reading ahead was taken, so nothing of the later one came between.
    assert noted[3:7] == [("own", number) for number in range(4)]
    assert numbers(thread, later) == [*range(9)]


def test_a_later_layer_goes_on_where_the_one_that_attends_gives_pieces_back(thread):
    noted = []
    own = thread.start(source(noted, "own", 3))
    thread.wait()
    later = thread.start(source(noted, "later", 9))
    pieces = thread.pieces(own)
    next(pieces)
    thread.wait()
    assert noted[3:] == []
    next(pieces)
    thread.wait()
    assert noted[3:] == [("later", 0)]
    pieces.close()
    assert numbers(thread, later) == [*range(9)]


def test_what_breaks_off_or_is_dropped_keeps_no_memory(thread):
    noted = []
    for _ in range(4):
        broken = thread.pieces(thread.start(source(noted, "broken", 5)))
        next(broken)
        dropped = thread.start(source(noted, "dropped", 5))
        assert numbers(thread, thread.start(source(noted, "own", 5))) == [*range(5)]
        thread.drop(dropped)
    noted.clear()
    thread.start(source(noted, "next", 9))
    thread.wait()
    assert len(noted) == 3


def test_what_goes_wrong_while_reading_is_raised_where_it_is_attended_to(thread):
    def breaks(memory):
        next(memory)
        raise OSError("the drive is gone")
        yield

    fetch = thread.start(breaks)
    thread.wait()
    with pytest.raises(OSError, match="the drive is gone"):
        numbers(thread, fetch)
    assert numbers(thread, thread.start(source([], "own", 5))) == [*range(5)]


@pytest.mark.parametrize(("row_bytes", "piece", "ahead"), [(16384, 256, 8), (20480, 192, 11)])
def test_as_many_rows_land_ahead_as_in_hillinfers_area(row_bytes, piece, ahead):
    # OPT-6.7B's rows and LLaMA-13B's, a tenth of 32,768 tokens, areas of 2,048 rows.
    assert piece_units(3277, 1, row_bytes, PIECE_BYTES) == piece
    assert piece_counts(2048, 2, 3277, 1, row_bytes, PIECE_BYTES) == (2, ahead)
    assert 2048 <= ahead * piece < 2048 + piece
    # Pages of 16 tokens.
    assert piece_units(205, 16, row_bytes, PIECE_BYTES) == piece // 16
    assert piece_counts(2048, 2, 205, 16, row_bytes, PIECE_BYTES) == (2, ahead)


def test_no_more_lands_than_is_selected_and_nothing_ahead_without_predictions():
    assert piece_counts(2048, 2, 200, 1, 768, PIECE_BYTES) == (1, 2)
    assert piece_units(200, 1, 768, PIECE_BYTES) == 256
    assert piece_counts(2048, 0, 3277, 1, 16384, PIECE_BYTES) == (2, 0)
    meter = Meter(None)
    landing(3, meter)
    assert meter.traffic().dram_bytes == (2 + 3) * PIECE_ROWS * ROW_BYTES
