# SPDX-License-Identifier: Apache-2.0
"""The command that makes the figures of many hosts: what it refuses, its tables, and its report."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from replicas import wait_until
from test_fleet import CHAINS, trace_of
from tiny_folder import character_tokenizer, save_tiny

from hillinfer.errors import SettingsError
from hillinfer.store.store import Store
from hillinfer_bench.hosts import routing
from hillinfer_bench.hosts import run as command
from hillinfer_bench.hosts.request import HostsRequest, Part
from hillinfer_bench.hosts.routing import RoutingRow, measure_policy, routing_text, two_replicas
from hillinfer_bench.serving.streams import Client
from hillinfer_hosts.held import HeldPrefixes

PLUGIN = Path(__file__).parents[3] / "plugins/hillinfer_hosts"
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


def wait_for_rows(monkeypatch, places):
    """Have each answer come once its rows are found, which else is a moment later."""
    ask, groups = Client.ask, []

    def held():
        count = 0
        for place in places:
            with Store(place) as store:
                count += len(HeldPrefixes(store).everything().held)
        return count

    def settled(client, content, tokens):
        answer = ask(client, content, tokens)
        groups.append(answer.prompt_tokens // 64 - answer.cached_tokens // 64)
        wait_until(lambda: held() >= sum(groups))
        return answer

    monkeypatch.setattr(Client, "ask", settled)


def test_policies_are_measured_behind_two_replicas(tmp_path, monkeypatch, warm_python):
    pytest.importorskip("openai")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(warm_python)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    wait_for_rows(monkeypatch, [tmp_path / name / "store" for name in routing.NAMES])
    paths = (str(PLUGIN), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setattr(routing, "_SETTLED_SECONDS", 0.5)
    folder = save_tiny(tmp_path / "tiny", tokenizer=character_tokenizer())
    # Five groups and some tokens, so that what was computed is what is new in a store.
    text = "the cat sat on the mat and the dog lay in the fog. " * 6
    rows = {}
    with two_replicas(tmp_path, str(folder)) as replicas:
        for policy in ("prefix", "round-robin"):
            documents = [f"{policy} {number} {text}" for number in range(2)]
            rows[policy] = measure_policy(tmp_path, policy, replicas, documents, 3, 1)
    for row in rows.values():
        assert row.requests == 6
        assert row.prompt_tokens > 6 * len(text)
        assert 0 < row.first_p50 <= row.first_p95
    # Who takes turns looks at no prompt.
    assert rows["prefix"].looking_seconds > 0 == rows["round-robin"].looking_seconds
    # Each document is read once, of those that take turns by both: four questions find it, and two.
    assert rows["prefix"].cached_tokens >= 4 * 256
    assert 2 * 256 <= rows["round-robin"].cached_tokens < 3 * 320


def test_a_row_of_routing_has_its_share():
    row = RoutingRow("prefix", 6, 1000, 250, 0.5, 1.5, 0.002)
    assert row.hit_share == 0.25
    line = routing_text([row]).splitlines()[-1]
    assert all(one in line for one in ("prefix", "0.250", "0.50 s", "1.50 s", "2.0 ms"))
