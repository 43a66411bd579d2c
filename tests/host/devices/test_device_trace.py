# SPDX-License-Identifier: Apache-2.0
"""Launches of a device in a trace."""

from contextlib import closing

import pytest
from told_runtime import Told, long_story, same
from trace_events import check, load, spans

from hillinfer.trace.trace_file import Lanes, TraceFile


@pytest.mark.parametrize("limit", [100, 0])
def test_launches_are_in_the_trace_and_change_nothing(limit, cold_dir, tmp_path):
    with closing(Told(cold_dir, limit=limit)) as told:
        untraced = long_story(told)
    lanes = Lanes(TraceFile(tmp_path / "t.json"))
    with closing(Told(cold_dir, limit=limit, recorder=lanes)) as told:
        assert same(long_story(told), untraced)
        statistics = told.runtime.statistics()
    lanes.close()
    events = load(tmp_path / "t.json")
    check(events)
    launches = spans(events, "device scoring", "launch")
    assert len(launches) == statistics.kernel_launches > 0
    scored = sum(one["args"]["tokens"] for one in launches)
    assert scored == statistics.device_scored_tokens > 0
