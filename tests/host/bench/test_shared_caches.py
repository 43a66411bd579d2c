# SPDX-License-Identifier: Apache-2.0
"""Caches that share a stored prompt are measured beside a session, and judged by goals."""

from dataclasses import replace

import pytest

from hillinfer_bench.storing.measured import Measured
from hillinfer_bench.storing.mixed_load import MixedLoad, Work
from hillinfer_bench.storing.shared import SharedRow, Steps, measure_shared
from hillinfer_bench.traces.table import TraceRow

NAMES = (
    "cache_open_over_allowed",
    "second_cache_milliseconds",
    "second_cache_bytes",
    "shared_step_over_session",
)


def goals_of(measured):
    return {one.name: one for one in measured.goals()}


def test_a_second_cache_brings_no_bytes_and_its_steps_have_the_bits_of_a_sessions(tmp_path):
    said = []
    row = measure_shared(tmp_path / "shared", 2048, 2, 1, said.append)
    assert row.agrees
    assert row.second_bytes == 0
    assert len(row.shared.wall) == len(row.private.processor) == 8
    assert row.row_bytes == 2048 * 2 * 4096
    assert row.row_bytes / 8 < row.shadow_bytes < row.row_bytes / 4
    assert min(row.open_seconds + row.second_seconds + row.drive_seconds + row.memory_seconds) > 0
    assert said == ["2048 tokens of 2 layers stored, and saved as a session"]
    told = Measured(shared=row)
    assert "bits agree" in told.text(told.goals(), [])
    assert told.as_record()["shared"]["tokens"] == 2048


@pytest.fixture
def row():
    return SharedRow(
        1024, 1, 10, 100, [0.1] * 4, [0.6] * 4, [0.2] * 4, [0.02] * 4, 0,
        Steps([1.0, 2.06, 4.0]), Steps([1.0, 2.0, 1.0]), agrees=True,
    )  # fmt: skip


def test_opening_a_second_cache_and_steps_have_goals(row):
    # A tenth of the bytes at the drive's rate, and 50 ms.
    assert row.allowed_seconds == pytest.approx(0.11)
    # Memory that was not there before takes longer than the drive.
    assert row.possible_seconds == pytest.approx(0.2)
    assert replace(row, memory_seconds=[0.01]).possible_seconds == pytest.approx(0.06)
    # Pairs are compared and not their sums.
    assert row.step_ratio == pytest.approx(1.03)
    met = goals_of(Measured(shared=row))
    assert [met[name].is_met for name in NAMES] == [True] * 4
    assert met["second_cache_milliseconds"].reached == pytest.approx(20)
    worse = replace(
        row, open_seconds=[0.12] * 4, second_seconds=[0.021] * 4, second_bytes=1,
        shared=Steps([1.0, 2.07, 4.0]),
    )  # fmt: skip
    missed = goals_of(Measured(shared=worse))
    assert [missed[name].is_met for name in NAMES] == [False] * 4
    unmeasured = goals_of(Measured())
    assert {unmeasured[name].why for name in NAMES} == {"not in this run"}


@pytest.mark.parametrize(("lookups", "is_met"), [(50, True), (49, False)])
def test_a_mixed_load_that_was_starved_meets_no_goal(lookups, is_met):
    mixed = MixedLoad(2, 1200, work=[Work(lookups=lookups), Work(lookups=50)])
    found = goals_of(Measured(mixed=mixed))
    assert found["mixed_load_lookups"].is_met is is_met
    assert found["mixed_load_seconds"].is_met
    assert "mixed_load_lookups" not in goals_of(Measured())


# --- traces ---

CASES = (("lru", "always"), ("saved", "always"), ("saved", "seen-once"), ("saved", "adaptive"))


def replayed(trace, share, *seconds):
    return [
        TraceRow(trace, share, 10, *case, tokens=0.0, seconds=own / 100, written=0)
        for case, own in zip(CASES, seconds, strict=True)
    ]


@pytest.mark.parametrize(
    ("synthetic", "reached", "is_met"),
    [((20, 24, 23, 23.5), (-0.25, 3.5, 0.5), True), ((20, 22, 23.5, 22), (-0.25, 2, 1.5), False)],
)
def test_traces_have_a_goal_for_the_synthetic_one_and_for_admission(synthetic, reached, is_met):
    rows = replayed("conversation", 0.05, 30, 29.75, 20, 29.75)
    found = goals_of(Measured(saved=rows + replayed("synthetic", 0.05, *synthetic)))
    names = ("saved_seconds_over_lru", "saved_on_synthetic_over_lru", "admission_under_better")
    assert [found[name].reached for name in names] == pytest.approx(reached)
    assert [found[name].is_met for name in names] == [True, is_met, is_met]
