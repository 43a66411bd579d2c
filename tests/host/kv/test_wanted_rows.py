# SPDX-License-Identifier: Apache-2.0
"""Rows that are wanted: parts of them say the same."""

import numpy as np
import pytest

from hillinfer.drive.landing import WantedRows

OUT = np.zeros((8, 64), np.uint8)
WANTED = WantedRows(3, np.array([200, 5, 64, 7, 63]), OUT, np.array([4, 0, 7, 2, 1]))


def put_together(parts):
    assert all(part.layer == 3 and part.out is OUT for part in parts)
    rows = np.concatenate([part.rows for part in parts]).tolist()
    return dict(zip(rows, np.concatenate([part.places for part in parts]).tolist(), strict=True))


@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_pieces_are_the_whole(most):
    pieces = list(WANTED.pieces(most))
    assert [len(piece.rows) for piece in pieces[:-1]] == [most] * (len(pieces) - 1)
    assert put_together(pieces) == put_together([WANTED])
    # The twin: a piece that is missing would be seen.
    if len(pieces) > 1:
        assert put_together(pieces[1:]) != put_together([WANTED])


def test_some_of_them_go_where_they_went():
    own = WANTED.rows >= 64
    assert put_together([WANTED.only(~own)]) == {5: 0, 7: 2, 63: 1}
    assert put_together([WANTED.only(own)]) == {200: 4, 64: 7}
    # The twin: with one row more they are others.
    assert put_together([WANTED.only(WANTED.rows >= 63)]) != put_together([WANTED.only(own)])


def test_a_group_has_64_rows():
    assert WANTED.groups.tolist() == [3, 0, 1, 0, 0]
