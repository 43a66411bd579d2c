# SPDX-License-Identifier: Apache-2.0
"""Cold coded tokens that are read both ways."""

from contextlib import closing

import numpy as np
import pytest
from replay_cases import coded, random_trace

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer_bench.replay.code_split import SharedMemory, SplitReplay
from hillinfer_bench.replay.cold_codes import (
    ColdReading,
    ColdReads,
    DriveCost,
    coder_of,
    cold_rows,
    table,
)

GROUP = 64
SHAPE = ModelShape(2, 3, 9, 64, StoredType.FLOAT16, 4096)


@pytest.fixture
def reading(cold_dir):
    with closing(ColdReading(cold_dir, curve_bytes=1 << 20)) as opened:
        yield opened


def test_what_is_cold_is_what_the_replay_reads():
    trace = coded(random_trace(steps=8))
    memory = SharedMemory(SHAPE, trace.selected.settings, 1108, 2 * 100_000)
    for share in (0.0, 0.5):
        rows = cold_rows(trace, memory, share)
        found = SplitReplay(trace, memory.split(share)).replayed()
        count = sum(len(one) for own in rows for one in own)
        assert count == found.drive_rows - found.exact_misses > 0
        assert len(rows) == 8
        assert all((np.diff(one) > 0).all() for own in rows for one in own)


def test_reads_are_planned_as_the_product_does(reading):
    shape, coder = SHAPE, coder_of(coded(random_trace(steps=8)), SHAPE)
    # Every second token of a group; then two that lie 100 groups apart.
    rows = [
        [np.arange(0, GROUP, 2), np.arange(0)],
        [np.array([3, 100 * GROUP]), np.array([100 * GROUP + 1])],
    ]
    whole, codes = reading.both(shape, coder, rows)
    assert (whole.way, whole.record_bytes) == ("rows", 768)
    # 99 bytes of codes, at multiples of 64.
    assert (codes.way, codes.record_bytes) == ("codes", 128)
    assert whole.tokens == codes.tokens == 35 / 2
    # One read for the group, then one for each token, by layer.
    assert whole.reads == codes.reads == 4 / 2
    assert whole.byte_count == (12 + 1 + 1 + 1) * PAGE_BYTES / 2
    assert codes.byte_count == (2 + 1 + 1 + 1) * PAGE_BYTES / 2
    assert min(whole.seconds, codes.seconds, whole.curve_seconds, codes.curve_seconds) > 0
    assert whole.coding_seconds > codes.coding_seconds == 0
    assert len(table([("a", "b", "c", one) for one in (whole, codes)]).splitlines()) == 4


def test_what_reads_and_bytes_cost_follows_from_times():
    def read(reads, mebibytes, seconds):
        return ColdReads("codes", 128, reads, reads, mebibytes * 2**20, seconds, 0, 0)

    exact = [read(1000, 2, 0.012), read(100, 10, 0.011), read(500, 3, 0.008)]
    cost = DriveCost.of(exact)
    assert cost.read_seconds == pytest.approx(1e-5)
    assert cost.mebibyte_seconds == pytest.approx(1e-3)
    assert cost.deviation == pytest.approx(0, abs=1e-9)
    assert cost.text().startswith("a read 10.0 µs, a MiB 1.00 ms: ")
    # The twin: one time that follows from neither is off.
    assert DriveCost.of([*exact, read(1000, 2, 0.018)]).deviation > 0.1


def test_nothing_cold_takes_nothing(reading):
    none = [[np.arange(0), np.arange(0)]]
    for one in reading.both(SHAPE, coder_of(coded(random_trace(steps=8)), SHAPE), none):
        assert (one.tokens, one.reads, one.byte_count, one.seconds) == (0, 0, 0, 0)
