# SPDX-License-Identifier: Apache-2.0
"""The command that makes the figures of many hosts: what it refuses, its tables, and its report."""

import json

import pytest
from test_fleet import CHAINS, trace_of

from hillinfer.errors import SettingsError
from hillinfer_bench.hosts import run as command
from hillinfer_bench.hosts.request import HostsRequest, Part
from hillinfer_bench.hosts.routing import RoutingRow, routing_text

SIZES = {"documents": 2, "document_tokens": 100, "questions": 2, "together": 1}


def request(tmp_path, **more):
    told = SIZES | {"copies": 2, "share": 0.5, "out": tmp_path / "hosts.json"} | more
    return HostsRequest(frozenset({Part.FLEET}), "tiny", tmp_path, **told)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("copies", 0), ("copies", 101), ("share", 0.0), ("share", 1.1), ("questions", 0)],
)
def test_sizes_that_mean_nothing_are_refused(tmp_path, name, wrong):
    request(tmp_path)
    with pytest.raises(SettingsError, match=f"{name}={wrong}"):
        request(tmp_path, **{name: wrong})


def test_a_fleet_is_reported(tmp_path, monkeypatch):
    traces = {"one": trace_of(CHAINS, 4), "two": trace_of(CHAINS, 4, gap=60.0)}
    monkeypatch.setattr(command, "CARRIED_TRACES", tuple(traces))
    monkeypatch.setattr(command.RequestTrace, "carried", traces.__getitem__)
    said = []
    text = command.run(request(tmp_path), said.append)
    report = json.loads((tmp_path / "hosts.json").read_text())
    assert report["fleet"]["label"].startswith("modelled")
    assert report["fleet"]["entry"]["label"].startswith("measured")
    rows = report["fleet"]["rows"]
    # One copy and two of each trace, nine cases each.
    assert len(rows) == 2 * 2 * 9
    assert {row["hosts"] for row in rows} == {4, 8}
    assert sum(line.startswith("modelled:") for line in text.splitlines()) >= 2
    assert "routing" not in report


def test_a_row_of_routing_has_its_share():
    row = RoutingRow("prefix", 6, 1000, 250, 0.5, 1.5, 0.002)
    assert row.hit_share == 0.25
    line = routing_text([row]).splitlines()[-1]
    assert all(one in line for one in ("prefix", "0.250", "0.50 s", "1.50 s", "2.0 ms"))
