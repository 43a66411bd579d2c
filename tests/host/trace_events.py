# SPDX-License-Identifier: Apache-2.0
"""What every trace must be like, for tests of traces."""

import json

from hillinfer.trace.recorder import Lane


class NotNestedError(AssertionError):
    """Two spans of one thread overlap without one lying in the other."""


def load(file):
    """Return the events of a whole file, as any JSON parser sees them."""
    return json.loads(file.read_text(encoding="utf-8"))


def spans(events, lane=None, name=None):
    return [
        one
        for one in events
        if one["ph"] == "X" and lane in (None, one["cat"]) and name in (None, one["name"])
    ]


def ends(span):
    """Return start and end in whole nanoseconds."""
    start = round(span["ts"] * 1000)
    return start, start + round(span["dur"] * 1000)


def check(events):
    """Fail on what a trace viewer would refuse or show wrongly."""
    assert events[0]["name"] == "process_name"
    named = {one["tid"] for one in events if one["name"] == "thread_name"}
    sorted_ = {one["tid"] for one in events if one["name"] == "thread_sort_index"}
    threads = {}
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= set(event), event
        assert event["ph"] in ("X", "M"), event
        assert event["pid"] == events[0]["pid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            assert event["ts"] >= 0, event
            assert event["cat"] in set(Lane), event
            assert isinstance(event["args"]["step"], int), event
            threads.setdefault(event["tid"], []).append(event)
    assert named == sorted_ == set(threads)
    for own in threads.values():
        assert len({one["cat"] for one in own}) == 1
        check_nested(own)


def check_nested(own):
    """Fail where two spans of one thread overlap without one lying in the other."""
    open_until = []
    for start, stop in sorted(map(ends, own), key=lambda one: (one[0], -one[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        if open_until and stop > open_until[-1]:
            raise NotNestedError((start, stop, open_until[-1]))
        open_until.append(stop)
