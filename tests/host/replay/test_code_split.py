# SPDX-License-Identifier: Apache-2.0
"""Replaying exact rows and codes that share one memory."""

from dataclasses import replace

import numpy as np
import pytest
from replay_cases import SETTINGS, coded, random_trace

from hillinfer.errors import BudgetError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer_bench.replay.code_split import (
    CodedTrace,
    ReadReplay,
    Reads,
    SharedMemory,
    Split,
    SplitReplay,
    budget_parts,
    planned_reads,
)
from hillinfer_bench.replay.code_sweep import split_rows, splits_text
from hillinfer_bench.replay.following_share import FollowingReplay, Follows

GROUP = 64
SHAPE = ModelShape(2, 3, 9, 64, StoredType.FLOAT16, 4096)


def by_hand(sets, exact):
    """One layer of a prefix of two groups, 130 tokens at its first step."""
    settings = random_trace(steps=2).settings.changed(kept_sinks=0, kept_recent=1, exact=0.02)
    base = replace(random_trace(steps=2), settings=settings, prefix=2 * GROUP, observed=((),))
    as_sets = [tuple(np.array(one, np.int32) for one in some) for some in (sets, exact)]
    return CodedTrace(replace(base, layers=(as_sets[0],)), (as_sets[1],))


# Token 5 is exact and 7 coded at first; then both are coded; 128 and later are in the open group.
SETS = ([5, 7, 128], [5, 7, 129], [5, 7, 130])
EXACT = ([5, 128], [129], [130])


def test_rows_of_a_trace_by_hand():
    trace = by_hand(SETS, EXACT)
    # No codes: 7 is read in every step, and 5 in none but the first, for its row is hot then.
    found = SplitReplay(trace, Split(hot_rows=1, codes=0)).replayed()
    assert (found.exact, found.coded) == (1, 5)
    assert (found.exact_misses, found.code_misses, found.drive_rows) == (1, 5, 1 + 3)
    # Codes of a whole prefix: only the exact row is read.
    every = SplitReplay(trace, Split(hot_rows=1, codes=2 * GROUP)).replayed()
    assert (every.exact_misses, every.code_misses, every.drive_rows) == (1, 0, 1)
    # The twin: without a slot for its row, 5 is read whenever it is coded.
    none = SplitReplay(trace, Split(hot_rows=0, codes=0)).replayed()
    assert none.drive_rows == 6


def test_codes_that_arrive_are_kept_where_they_are_wanted_more():
    # The first group fills all slots as it is read, so tokens of the second one have none.
    sets = ([70, 128], [70, 129], [70, 130])
    trace = by_hand(sets, ([128], [129], [130]))
    found = SplitReplay(trace, Split(hot_rows=0, codes=GROUP)).replayed()
    assert (found.coded, found.code_misses, found.drive_rows) == (3, 1, 1)
    twin = by_hand(([70, 128], [71, 129], [72, 130]), ([128], [129], [130]))
    assert SplitReplay(twin, Split(hot_rows=0, codes=GROUP)).replayed().drive_rows == 3


def test_more_of_either_pool_misses_less():
    trace = coded(random_trace())
    codes = [SplitReplay(trace, Split(30, slots)).replayed() for slots in (0, 256, 640, 1216)]
    misses = [one.code_misses for one in codes]
    assert misses == sorted(misses, reverse=True)
    assert misses[0] == codes[0].coded
    assert misses[-1] == 0
    assert {one.exact_misses for one in codes} == {codes[0].exact_misses}
    rows = [SplitReplay(trace, Split(slots, 0)).replayed() for slots in (0, 60, 1200)]
    assert [one.exact_misses for one in rows] == sorted(
        (one.exact_misses for one in rows), reverse=True
    )
    assert rows[0].exact_misses == rows[0].exact
    assert (rows[-1].exact_misses, rows[-1].drive_rows) == (0, 0)


def test_a_share_divides_all_that_is_shared():
    settings = coded(random_trace()).selected.settings
    memory = SharedMemory(SHAPE, settings, 1140, 2 * 300_000)
    # 3 heads of 64 channels: 96 bytes of codes, 3 exponents, 8 bytes of tables.
    assert memory.slot_bytes == 107
    half = memory.split(0.5)
    # 1401 codes, whole chunks of 64; rows of 768 bytes and 22 of bookkeeping.
    assert half.codes == 1344
    assert half.hot_rows == 36 + (300_000 - 1344 * 107) // 790
    assert memory.split(0.0) == Split(36 + 300_000 // 790, 0)
    # No more codes than there are row numbers.
    much = replace(memory, byte_count=2 * 3_000_000).split(1.0)
    assert (much.codes, much.hot_rows) == (2048, 36 + (3_000_000 - 2048 * 107) // 790)


def test_parts_of_a_budget_add_up_to_it():
    settings = coded(random_trace()).selected.settings
    said = budget_parts(SHAPE, settings, 1140, "6MiB")
    whole, parts = said.split(": ")
    sizes = [float(one.split()[-1]) for one in parts.split(", ")]
    assert whole == "M0 6MiB of 1,140 tokens, 6.29 MB, with α 0.1"
    assert sum(sizes) == pytest.approx(6.29, abs=0.03)
    shared = SharedMemory.of_budget(SHAPE, settings, 1140, "6MiB").byte_count
    assert sizes[-1] == pytest.approx(shared / 1e6, abs=0.006)
    # The twin: more memory is more for codes and rows, and for nothing else.
    more = budget_parts(SHAPE, settings, 1140, "7MiB").split(": ")[1]
    assert more.split(", ")[:-1] == parts.split(", ")[:-1]
    assert more != parts


def test_reads_are_planned_as_the_library_plans_them():
    assert planned_reads(np.zeros(0, np.int64), 128) == Reads()
    # Records 0 to 3 fill a sector; 64 begin 8 KiB behind its end, and 68 begin one sector later.
    assert planned_reads(np.array([1]), 128) == Reads(1, 512)
    assert planned_reads(np.array([68, 1]), 128) == Reads(1, 18 * 512)
    assert planned_reads(np.array([72, 1]), 128) == Reads(2, 2 * 512)
    # A row of 768 bytes lies in two sectors; a long run comes in pieces of 256 KiB.
    assert planned_reads(np.array([3]), 768) == Reads(1, 1024)
    assert planned_reads(np.arange(2049), 128) == Reads(2, (256 << 10) + 512)
    assert Reads(6, 12) + Reads(2, 4) == Reads(8, 16) == Reads(16, 32).each(2)


def test_codes_in_memory_save_reads_of_a_file_and_more_reads_of_rows():
    trace = coded(random_trace(steps=8))
    none, most = (ReadReplay(trace, Split(40, slots), 768, 128) for slots in (0, 1024))
    for one in (none, most):
        one.replayed()
    saved = none.codes.byte_count - most.codes.byte_count
    assert 0 < saved < none.rows.byte_count - most.rows.byte_count
    assert none.exact.reads > 0
    # The twin has a record of another size.
    twin = ReadReplay(trace, Split(40, 0), 768, 192)
    twin.replayed()
    assert (twin.exact, twin.rows) == (none.exact, none.rows)
    assert twin.codes != none.codes


def test_time_of_a_drive_is_modelled_by_reads_and_bytes():
    assert Reads(1000, 2 << 20).milliseconds == pytest.approx(10.8 + 1.9)
    assert Reads().milliseconds == 0


@pytest.mark.parametrize("follows", Follows)
@pytest.mark.parametrize(("exact", "grows"), [(0, True), (200, False)])
def test_a_share_follows_what_is_wanted(follows, exact, grows):
    """Where tokens are coded alone, or exact alone, memory goes where it earns."""
    trace = coded(random_trace(steps=40, settings=SETTINGS.changed(kept_recent=1)), 5 + exact)
    memory = SharedMemory(SHAPE, trace.selected.settings, 1140, 200_000)
    replay = FollowingReplay(trace, memory, 0.5, follows, 768, 128)
    before = replay.code_slots
    found = replay.replayed()
    assert (replay.code_slots > before, replay.code_slots < before) == (grows, not grows)
    # As many tokens are looked for where the share is constant, and others of them are cold.
    constant = ReadReplay(trace, memory.split(0.5), 768, 128).replayed()
    assert (constant.exact, constant.coded) == (found.exact, found.coded)
    assert constant != found


def test_rows_of_the_sweep():
    trace = coded(random_trace(steps=8))
    *rows, by_hits, by_reads = split_rows(trace, SHAPE, ("6MiB",), (0.9, 0.0, 0.3))
    assert [row.share for row in rows] == [0.0, 0.3, 0.9]
    assert (by_hits.follows, by_reads.follows) == ("hits", "reads")
    memory = SharedMemory.of_budget(SHAPE, trace.selected.settings, 1108, "6MiB")
    for row in rows:
        split = memory.split(row.share)
        assert (row.code_slots, row.hot_slots) == (split.codes, split.hot_rows)
        assert row.drive_rows == SplitReplay(trace, split).replayed().drive_rows / 8
        assert row.drive_rows <= row.exact_misses + row.code_misses
    first, second = rows[:2]
    assert first.code_hits_per_mebibyte is None
    gained = first.code_misses - second.code_misses
    mebibytes = (second.code_slots - first.code_slots) * 2 * 107 / 2**20
    assert gained > 0
    assert second.code_hits_per_mebibyte == pytest.approx(gained / mebibytes)
    text = splits_text([*rows, by_hits])
    assert len(text.splitlines()) == 2 + len(rows) + 1
    assert text.count("follows hits") == 1
    with pytest.raises(BudgetError, match="too small"):
        split_rows(trace, SHAPE, ("1KiB",))
