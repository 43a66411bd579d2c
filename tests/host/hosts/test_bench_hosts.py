# SPDX-License-Identifier: Apache-2.0
"""The command that makes the figures of many hosts: what it refuses, its tables, and its report."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from replicas import wait_until
from test_fleet import CHAINS, trace_of
from tiny_folder import character_tokenizer, save_tiny

from hillinfer.errors import SettingsError
from hillinfer.store.store import Store
from hillinfer_bench.hosts import run as command
from hillinfer_bench.hosts.request import HostsRequest, Part
from hillinfer_bench.hosts.routing import (
    NAMES,
    RoutingRow,
    measure_policy,
    routing_text,
    two_replicas,
)
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


def test_a_fleet_is_reported(tmp_path):
    traces = [trace_of(CHAINS, 4), trace_of(CHAINS, 4, gap=60.0)]
    said = []
    text = command.run(request(tmp_path), said.append, traces)
    report = json.loads((tmp_path / "hosts.json").read_text())
    assert report["fleet"]["label"].startswith("modelled")
    assert report["fleet"]["entry"]["label"].startswith("measured")
    rows = report["fleet"]["rows"]
    # One copy and two of each trace, nine cases each.
    assert len(rows) == 2 * 2 * 9
    assert {row["hosts"] for row in rows} == {4, 8}
    assert sum(line.startswith("modelled:") for line in text.splitlines()) >= 2
    assert "routing" not in report


def waiting_for_rows(places):
    """Return what connects so that each answer comes once its rows are found, a moment later."""
    groups = []

    def held():
        count = 0
        for place in places:
            with Store(place) as store:
                count += len(HeldPrefixes(store).everything().held)
        return count

    class Settled(Client):
        def ask(self, content, tokens):
            answer = super().ask(content, tokens)
            groups.append(answer.prompt_tokens // 64 - answer.cached_tokens // 64)
            wait_until(lambda: held() >= sum(groups))
            return answer

    return lambda router: closing(Settled(router))


@pytest.mark.bench
def test_policies_are_measured_behind_two_replicas(tmp_path, monkeypatch, warm_python):
    pytest.importorskip("openai")
    connect = waiting_for_rows([tmp_path / name / "store" for name in NAMES])
    paths = (str(PLUGIN), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    folder = save_tiny(tmp_path / "tiny", tokenizer=character_tokenizer())
    # Five groups and some tokens, so that what was computed is what is new in a store.
    text = "the cat sat on the mat and the dog lay in the fog. " * 6
    rows = {}
    with two_replicas(tmp_path, str(folder), warm_python) as replicas:
        for policy in ("prefix", "round-robin"):
            documents = [f"{policy} {number} {text}" for number in range(2)]
            rows[policy] = measure_policy(
                tmp_path, policy, replicas, documents, 3, 1, connect, warm_python
            )
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
