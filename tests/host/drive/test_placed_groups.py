# SPDX-License-Identifier: Apache-2.0
"""Groups lie in any file at any byte, and rows of them land right."""

from dataclasses import replace

import numpy as np
import pytest
from interrupts import interrupted
from landings import WAYS, SeenReads, file_of, land, random_content, wanted_rows

from hillinfer.drive.files import PAGE_BYTES, IOMode, probe_io_mode
from hillinfer.drive.regions import OWN_FILE, OtherFiles, Placement
from hillinfer.drive.shared_files import RowBase

GROUP = 64


@pytest.mark.parametrize("row_bytes", [64, 768, 1024, 12288])
@pytest.mark.parametrize("seed", range(3))
def test_rows_land_from_where_their_groups_lie(row_bytes, seed, tmp_path):
    content, chooser = random_content(), np.random.default_rng(seed)
    size = GROUP * row_bytes
    slots = len(content) // (size + PAGE_BYTES)
    most = min(12, slots)
    starts = chooser.permutation(slots)[:most] * (size + PAGE_BYTES)
    rows = chooser.permutation(most * GROUP)[:150]
    offsets = starts[rows // GROUP] + rows % GROUP * row_bytes
    expected = content[offsets[:, None] + np.arange(row_bytes)]
    file = file_of(tmp_path, probe_io_mode(tmp_path), content)
    outcomes = []
    for way in WAYS:
        wanted = replace(wanted_rows(rows, row_bytes, 1 << 18), starts=starts)
        outcome = land(way, file, wanted, SeenReads())
        np.testing.assert_array_equal(outcome.out[wanted.places], expected)
        outcomes.append(outcome)
    for other in outcomes[1:]:
        assert other.landed == outcomes[0].landed
    # The twin: rows that are looked for one behind the other are not these.
    wanted = wanted_rows(rows % (len(content) // row_bytes), row_bytes, 1 << 18)
    assert not np.array_equal(land("twin", file, wanted, SeenReads()).out[wanted.places], expected)
    native = next(way for way in WAYS if way != "twin")
    wanted = replace(wanted_rows([most * GROUP], row_bytes, 1 << 18), starts=starts)
    with pytest.raises(IndexError):
        land(native, file, wanted, SeenReads())
    file.close()


def test_groups_lie_in_the_own_file_until_they_are_placed():
    placement = Placement(2)
    groups = np.arange(8)
    (part,) = placement.parts(0, groups)
    assert (part.chosen, part.file, part.starts) == (None, OWN_FILE, None)
    placement.place(slice(None), np.array([2, 5]), 3, np.array([[0, 4096], [8192, 12288]]))
    placement.place(slice(1, 2), np.array([6]), 4, np.array([[20480]]))
    assert placement.of(0, groups).tolist() == [-1, -1, 3, -1, -1, 3, -1, -1]
    assert placement.of(1, groups).tolist() == [-1, -1, 3, -1, -1, 3, 4, -1]
    assert placement.starts(1, groups, 100).tolist() == [0, 100, 8192, 300, 400, 12288, 20480, 700]
    parts = {part.file: part.chosen.nonzero()[0].tolist() for part in placement.parts(1, groups)}
    assert parts == {-1: [0, 1, 3, 4, 7], 3: [2, 5], 4: [6]}
    placement.forget(slice(None), np.array([5, 7, 100]))
    assert placement.of(0, groups).tolist() == [-1, -1, 3, -1, -1, -1, -1, -1]


def test_files_are_told_apart_however_many_came_and_went():
    """Each session that is loaded has a number of its own, and an engine may stay for weeks."""
    base = RowBase((), 2, IOMode.DIRECT)
    others = OtherFiles(1, GROUP * 64)
    for _ in range(1 << 15):
        others.add_base(0, RowBase((), 0, IOMode.DIRECT))
        others.drop_base(0)
    others.add_base(4, base)
    assert others.placement.of(0, np.arange(7)).tolist() == [-1] * 4 + [1 << 15] * 2 + [-1]
    (part,) = others.placement.parts(0, np.arange(4, 6))
    assert (part.file, part.starts[4:6].tolist()) == (1 << 15, [0, GROUP * 64])
    # The twin: they lie in the own file once the base is gone.
    others.drop_base(4)
    assert others.placement.of(0, np.arange(7)).tolist() == [-1] * 7


@pytest.mark.parametrize(
    ("function", "event"),
    [(OtherFiles.place_in_all, "call"), (Placement.place, "call"), (Placement.place, "return")],
)
def test_of_a_base_that_ctrl_c_kept_from_coming_nothing_is_there(function, event):
    """Its files are closed, and others get the numbers of its groups."""
    others = OtherFiles(1, GROUP * 64)
    with pytest.raises(KeyboardInterrupt), interrupted(function, event):
        others.add_base(4, RowBase((), 2, IOMode.DIRECT))
    assert not others.are_used
    assert not others.in_base(np.arange(7))
    assert others.placement.of(0, np.arange(7)).tolist() == [-1] * 7
    # The twin: it comes.
    others.add_base(4, RowBase((), 2, IOMode.DIRECT))
    assert others.are_used
    assert others.placement.of(0, np.arange(7)).tolist() == [-1] * 4 + [1] * 2 + [-1]


def test_files_that_come_while_somebody_asks_how_all_are_read():
    others = OtherFiles(1, GROUP * 64)

    class Meanwhile:
        """A mode that is looked at in the moment in which another thread opens a file."""

        def __hash__(self):
            if others.base_like(late) is None:
                others.add_base(8, late)
            return hash(IOMode.BUFFERED)

        def __eq__(self, other):
            return other is IOMode.BUFFERED

    late = RowBase((), 0, IOMode.BUFFERED, [], ("late",))
    others.add_base(0, RowBase((), 0, IOMode.DIRECT, [], ("first",)))
    others.add_base(4, RowBase((), 0, Meanwhile(), [], ("second",)))
    assert others.io_modes == {IOMode.DIRECT, IOMode.BUFFERED}
    # The twin: without the files that are read so, none is.
    for first in (4, 8):
        others.drop_base(first)
    assert others.io_modes == {IOMode.DIRECT}
