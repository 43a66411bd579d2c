# SPDX-License-Identifier: Apache-2.0
"""A goal of the store that arithmetic forbids shows what is possible beside what was reached."""

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hillinfer.drive.calls import DriveCalls
from hillinfer.store.keys import CHUNK_TOKENS
from hillinfer.store.store import Store
from hillinfer_bench.storing.beside import ReadsBeside
from hillinfer_bench.storing.cost import CostRow
from hillinfer_bench.storing.first_token import FirstToken
from hillinfer_bench.storing.goals import at_least, at_most, goals_text
from hillinfer_bench.storing.made_prompts import prompt
from hillinfer_bench.storing.measured import Measured
from hillinfer_bench.storing.part import Part
from hillinfer_bench.storing.run import StoreRequest, run
from hillinfer_bench.storing.speed import LookupRow, make_stored


@pytest.mark.parametrize(
    ("possible", "told"), [(40.0, "(at most 40 is possible here: 90% of it)"), (60.0, None)]
)
def test_what_is_possible_is_told_where_the_goal_lies_beyond_it(possible, told):
    goal = at_least("speedup", 36, 50, [1.0, 1.0], allowed=possible)
    assert not goal.is_met
    assert goal.allowed == (possible if told else None)
    line = goals_text([goal])
    assert line.endswith(told or "goal >= 50: not met")


@pytest.mark.parametrize(
    ("possible", "told"), [(0.8, "(no less than 0.8 is possible here: 80% of it)"), (0.7, None)]
)
def test_so_it_is_for_goals_that_are_a_bound_above(possible, told):
    goal = at_most("share", 1.0, 0.75, [1.0, 1.0], allowed=possible)
    assert not goal.is_met
    assert goal.allowed == (possible if told else None)
    line = goals_text([goal])
    assert line.endswith(told or "goal <= 0.75: not met")


def test_what_is_possible_makes_no_goal_met():
    assert not at_most("share", 0.76, 0.75, allowed=0.76).is_met
    assert not at_least("speedup", 49.9, 50, allowed=49.9).is_met
    assert at_least("speedup", 50, 50, allowed=49.9).is_met


@pytest.mark.parametrize(
    ("both", "reading", "begins", "most", "told"),
    [
        # A pass that keeps both cores busy: half of what reading computes comes on top of it.
        (1.12, 0.12, 0.0, 0.4, "reading 0.120, computing 1.000; 0.0 ms"),
        (1.04, 0.04, 0.0, 0.8, "reading 0.040, computing 1.000; 0.0 ms"),
        # Cores that are idle meanwhile hide all of it, but for the first layer's rows.
        (0.62, 0.12, 0.0, 1.0, "reading 0.120, computing 0.500; 0.0 ms"),
        (0.62, 0.12, 0.03, 0.7, "computing 0.500; 30.0 ms until the first layer's rows are there"),
        # What it computes is not computed again.
        (1.12, 0.12, 0.03, 0.25, "30.0 ms until the first layer's rows are there"),
    ],
)
def test_reading_hides_behind_computing_as_far_as_cores_are_idle(both, reading, begins, most, told):
    first = FirstToken(
        8064, 64, 30.0, [0.55] * 3, [0.5] * 3, [0.1] * 3, [both] * 3, [reading] * 3, [begins] * 3,
        [begins] * 3, 2, [0.001] * 3, [0.002] * 3, [both + 0.01] * 3, [0] * 3, [7] * 3, [0.5] * 3,
        True, [],
    )  # fmt: skip
    assert first.hidden_possible == pytest.approx(most)
    assert told in first.line()
    assert f"leaves {most:.0%} of the smaller to be hidden; 50% is" in first.line()
    assert "waited 1.0 ms for rows and took 2.0 to place them" in first.line()
    assert "both take +10.0 processor ms beyond those apart" in first.line()
    assert first.line().endswith("page faults: computing 0, both 7")
    kind = SimpleNamespace(as_record=dict)
    told = Measured(model=(first, CostRow(1, [1.0], [1.0]), kind)).as_record()
    assert told["hidden_possible"] == pytest.approx(most)


def test_what_is_hidden_is_told_by_rounds():
    """A machine that is slower in one round is so in all of its figures."""
    first = FirstToken(
        8064, 64, 30.0, [0.52, 0.72, 0.72], [0.5, 0.6, 0.7], [0.1] * 3, [0.6] * 3, [0.1] * 3,
        [0.0] * 3, [0.0] * 3, 2, [0.0] * 3, [0.0] * 3, [0.6] * 3, [0] * 3, [0] * 3, [0.5] * 3, True,
        [],
    )  # fmt: skip
    # Two rounds of three hide 0.8; the medians of each figure would say that none is hidden.
    assert first.hidden_reached == pytest.approx(0.8)
    same = replace(first, stored_seconds=[0.52, 0.62, 0.8])
    assert same.hidden_reached == pytest.approx(0.8)
    less = replace(first, stored_seconds=[0.52, 0.65, 0.75])
    assert less.hidden_reached == pytest.approx(0.5)


def test_what_the_drives_reads_alone_add_to_a_pass_cannot_be_hidden():
    first = FirstToken(
        8064, 64, 30.0, [0.55] * 3, [0.5, 0.6, 0.7], [0.1] * 3, [0.6] * 3, [0.1] * 3, [0.0] * 3,
        [0.0] * 3, 2, [0.0] * 3, [0.0] * 3, [0.6] * 3, [0] * 3, [0] * 3, [0.52, 0.62, 0.9], True,
        [],
    )  # fmt: skip
    # By rounds, too: 20 ms in two of three.
    assert first.drive_seconds == pytest.approx(0.02)
    assert first.possible_seconds == pytest.approx(0.62)
    assert first.hidden_possible == pytest.approx(0.8)
    assert "reads alone add 20.0 ms to a pass" in first.line()
    # A pass that is faster beside them is the machine's noise, and allows no more.
    faster = replace(first, beside_seconds=[0.4, 0.5, 0.6])
    assert faster.possible_seconds == pytest.approx(0.6)
    assert faster.hidden_possible == pytest.approx(1)


class _Counted(DriveCalls):
    def __init__(self):
        self.reads = []

    def read_many(self, way, reads, address):
        self.reads += zip(reads.file_offsets.tolist(), reads.byte_counts.tolist(), strict=True)
        return super().read_many(way, reads, address)


def test_reads_beside_a_pass_are_those_of_all_layers_but_the_first(tmp_path):
    ids = prompt(1, 2 * CHUNK_TOKENS)
    space = make_stored(tmp_path / "store", "smollm2-135m", 8, [ids])
    calls = _Counted()
    with Store(tmp_path / "store", calls=calls) as store, store.find(space, ids) as found:
        reads = ReadsBeside(store, found)
        calls.reads.clear()
        with reads:
            pass
        shape, size = found.shape, 7 * found.shape.object_bytes
        starts = [one.record.span.offset + shape.rows_at(1) for one in found.chunks]
    wanted = [at for start in starts for at in range(start, start + size, 4 << 20)]
    assert sorted(at for at, _ in calls.reads) == sorted(wanted)
    assert sum(count for _, count in calls.reads) == 2 * size


def test_a_part_is_taken_alone(tmp_path):
    out, begun = tmp_path / "store.json", []

    @contextmanager
    def stage(name, total):
        begun.append((name, total))
        yield lambda done: None

    request = StoreRequest(
        "none", tmp_path, out, kills=3, flips=2, rounds=1, tokens=1024, gigabytes=0.1,
        mixed_seconds=1, peers=None, parts=frozenset({Part.FLIPS}),
    )  # fmt: skip
    text = run(request, begun.append, stage)
    assert begun == [("flips", 2)]
    record = json.loads(out.read_text())
    assert list(record["damage"]) == ["flips"]
    assert record["damage"]["flips"]["runs"] == 2
    assert record["failed"] == {}
    assert record["goals"]["kills"]["why"] == "not in this run"
    assert "not measured (not in this run)" in text
    assert sorted(tmp_path.iterdir()) == [out]


def test_a_first_lookup_takes_what_reading_its_sheets_takes_and_any_other():
    row = LookupRow(100, [1.0], [9.0] * 4, [2.0] * 4, [3.0, 3.0, 3.0, 3.0], [1.0])
    assert row.possible_first_p99 == pytest.approx(5)
    told = {one.name: one for one in Measured(lookups=row).goals()}["lookup_first_p99_milliseconds"]
    assert not told.is_met
    assert told.allowed is None
    slower = replace(row, sheet_milliseconds=[4.0] * 4)
    told = {one.name: one for one in Measured(lookups=slower).goals()}
    assert told["lookup_first_p99_milliseconds"].allowed == pytest.approx(6)
    assert "(median 9.0; reading its sheets alone 4.0)" in Measured(lookups=slower).text([], [])
