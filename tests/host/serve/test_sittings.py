# SPDX-License-Identifier: Apache-2.0
"""Load in several sittings: each goes on where the last one ended, and only all of them count."""

import json
import shlex
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from servers import running

from hillinfer.errors import SettingsError
from hillinfer.serve.rules import ApiKeys
from hillinfer.store.store import Store
from hillinfer_bench.serving.fuzzed import FuzzedRow
from hillinfer_bench.serving.planted import PlantedRow, measure_planted
from hillinfer_bench.serving.request import LoadSizes, ServingRequest
from hillinfer_bench.serving.run import Measured
from hillinfer_bench.serving.servers import RunningServer
from hillinfer_bench.serving.sittings import Sitting, earlier, options_of

KEYS = ("sk-of-tenant-00", "sk-of-tenant-01")
WANTED = 24


@pytest.fixture(scope="module")
def asked(endless_folder, cold_dir, tmp_path_factory):
    """A server of two tenants, and what it was asked so far."""
    folder = tmp_path_factory.mktemp("store") / "store"
    Store.create(folder, 1 << 26)
    with (
        Store(folder) as store,
        running(endless_folder, cold_dir, store, keys=ApiKeys(KEYS)) as server,
    ):
        own = RunningServer(server.url, "tiny", SimpleNamespace(pid=0), {"ignore_eos": True})

        def prompts():
            return [one["prompt_tokens"] for one in server.logged("answered")]

        yield own, prompts


def test_a_sitting_goes_on_where_the_last_one_ended(asked):
    server, prompts = asked
    whole = measure_planted(server, KEYS, "the cat. ", WANTED, lambda _: None)
    in_one = prompts()
    assert [(one.first, one.asked) for one in whole.sittings] == [(0, WANTED)]
    half = PlantedRow(asked=10, answered=10, wanted=WANTED, sittings=[Sitting(0, 10, 0, "")])
    row = measure_planted(server, KEYS, "the cat. ", WANTED, lambda _: None, half)
    assert (row.asked, row.answered) == (WANTED, WANTED)
    assert [(one.first, one.asked) for one in row.sittings] == [(0, 10), (10, WANTED - 10)]
    again = prompts()[len(in_one) :]
    assert len(again) == WANTED - 10
    assert (row.mixed, row.leaks) == (0, 0)


def test_a_sitting_ends_in_time(asked):
    server, _ = asked
    row = measure_planted(server, KEYS, "the cat. ", WANTED, lambda _: None, None, 0.0)
    assert (row.asked, row.wanted) == (0, WANTED)


def goals(**rows):
    return {one.name: one for one in Measured(**rows).goals()}


def test_only_all_requests_meet_a_goal():
    part = PlantedRow(asked=3500, answered=3500, wanted=10_000)
    made = goals(planted=part, fuzzed=FuzzedRow(7481, {"200": 7481}, 0.1, 10_000))
    for name in ("mixed_answers", "leaks", "http_500"):
        assert made[name].is_met is None
    assert made["leaks"].why == "3,500 of 10,000 requests so far"
    # What was found counts at once.
    assert goals(planted=replace(part, leaks=1))["leaks"].is_met is False
    assert goals(planted=replace(part, asked=10_000))["leaks"].is_met is True


@pytest.fixture
def request_of(tmp_path):
    def made(**options):
        load = LoadSizes(planted=20, sitting_seconds=60.0)
        given = {"model": "tiny", "directory": tmp_path, "out": tmp_path / "serve.json"}
        return ServingRequest(**{**given, "load": load, **options})

    return made


def report(request, **parts):
    record = {**options_of(request), "load": asdict(request.load), **parts}
    request.out.write_text(json.dumps(record))


def test_rows_come_back_from_a_report(request_of):
    request = request_of()
    assert earlier(request) == {}
    planted = PlantedRow(20, 19, statuses={503: 1}, wanted=20, sittings=[Sitting(0, 20, 0, "now")])
    fuzzed = FuzzedRow(7, {"200": 7}, 0.5, 9, [Sitting(0, 7, 1, "now")])
    report(request, planted=asdict(planted), fuzzed=asdict(fuzzed))
    rows = earlier(request)
    assert PlantedRow.of_record(rows["planted"]) == planted
    assert FuzzedRow.of_record(rows["fuzzed"]) == fuzzed
    # Who asks for no sittings begins anew.
    assert earlier(request_of(load=LoadSizes(planted=20))) == {}


def test_a_report_of_something_else_is_refused(request_of):
    request = request_of()
    report(request)
    with pytest.raises(SettingsError, match="name another --out"):
        earlier(request_of(prompt_tokens=151))
    request.out.write_text("[]")
    with pytest.raises(SettingsError, match="no report that a sitting can go on with"):
        earlier(request)


def test_the_command_asks_no_more_than_all(command, warm_python, endless_folder, tmp_path):
    out = tmp_path / "serve.json"

    def sat():
        return command(
            *("serving", "--model", endless_folder, "--dir", tmp_path, "--out", out),
            *("--part", "planted", "--prompt-tokens", 150, "--planted", 32, "--sitting", 60),
            *("--python", shlex.join(warm_python)),
        )

    assert sat().code == 0
    first = json.loads(out.read_text())
    assert first["failed"] == {}
    planted = first["planted"]
    assert (planted["asked"], planted["answered"], planted["statuses"]) == (32, 32, {})
    for name in ("mixed_answers", "leaks"):
        assert first["goals"][name]["reached"] == 0, name
        assert first["goals"][name]["is_met"], name
    told = sat()
    assert told.code == 0
    assert "planted: earlier sittings asked all" in told.err
    assert json.loads(out.read_text())["planted"] == first["planted"]
