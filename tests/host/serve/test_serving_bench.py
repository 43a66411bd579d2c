# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench serving`: its parts run on real servers, and its goals say what rows say."""

import json
import shlex
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from servers import running

from hillinfer.store.store import Store
from hillinfer_bench.serving.disconnects import DisconnectsRow
from hillinfer_bench.serving.limits import LimitRow, measure_limit
from hillinfer_bench.serving.measures import (
    CostRow,
    HealthRow,
    RestartRow,
    StreamsRow,
    measure_cost,
    measure_restart,
)
from hillinfer_bench.serving.planted import PlantedRow, _count, _Prompt
from hillinfer_bench.serving.request import Part
from hillinfer_bench.serving.run import Measured
from hillinfer_bench.serving.server_log import Holdings
from hillinfer_bench.serving.servers import RunningServer, ServerError
from hillinfer_bench.serving.streams import Answer, Burst, connected

DOCUMENT = "the cat sat on the mat and so on. " * 30


def test_a_run_of_the_command(command, warm_python, endless_folder, tmp_path):
    """The command starts a server, asks it, writes its report and leaves nothing else."""
    out, place = tmp_path / "serve.json", tmp_path / "place"
    told = command(
        *("serving", "--model", endless_folder, "--dir", place, "--out", out, "--rounds", 1),
        *("--part", "cost", "--part", "health", "--prompt-tokens", 150, "--new-tokens", 4),
        *("--part", "limit", "--python", shlex.join(warm_python)),
    )
    assert told.code == 0, told.err
    record = json.loads(out.read_text())
    assert record["failed"] == {}
    http, server = record["cost"]["http_seconds"], record["cost"]["server_seconds"]
    assert len(http) == len(server) == 5
    # The scheduler's clock runs within the client's.
    assert all(0 < inner < outer for inner, outer in zip(server, http, strict=True))
    assert record["health"]["bad"] == 0
    steps = record["limit"]["step_seconds"]
    assert record["limit_4_streams"] == pytest.approx(4 * steps["1"][0] / steps["4"][0])
    assert record["goals"]["speedup_4_streams"]["why"] == "not in this run"
    assert "own_first_token_ms_p95" in told.out
    assert [*place.iterdir()] == []


@pytest.mark.bench
def test_a_run_that_loads_the_server(command, endless_folder, tmp_path):
    """What the process itself holds is counted, so that it is one of its own from its start."""
    out, place = tmp_path / "serve.json", tmp_path / "place"
    told = command(
        *("serving", "--model", endless_folder, "--dir", place, "--out", out),
        *("--part", "disconnects", "--prompt-tokens", 150, "--disconnects", 16),
        *("--new-tokens", 24),
    )
    assert told.code == 0, told.err
    record = json.loads(out.read_text())
    assert record["failed"] == {}
    assert record["disconnects"]["asked"] == 16
    assert 0 < len(record["disconnects"]["cancelled_seconds"]) <= 16
    assert record["goals"]["left_behind"]["reached"] == 0
    assert record["goals"]["left_behind"]["is_met"]
    assert "soak_differing" not in record["goals"]
    assert [*place.iterdir()] == []


def test_who_ends_later_than_a_turn_is_late():
    held = Holdings(threads=3, files=9, resident_bytes=0)
    row = DisconnectsRow(3, [0.01, 0.14, 0.4], 0.1, held, replace(held, files=11))
    assert (row.late, row.leaked) == (1, 2)
    goals = {one.name: one for one in Measured(disconnects=row).goals()}
    assert not goals["ended_late"].is_met
    assert not goals["left_behind"].is_met


@pytest.mark.parametrize(
    ("text", "cached", "expected"),
    [
        ("it is bcd00001", 64, {"told": 1}),
        ("it is xyz00002", 64, {"mixed": 1}),
        ("nothing", 101, {"leaks": 1}),
        ("nothing", 63, {"missed": 1}),
    ],
)
def test_what_is_foreign_in_an_answer_is_counted(text, cached, expected):
    own = _Prompt("a", "", "bcd00001", [*range(120)])
    other = _Prompt("b", "", "xyz00002", [])
    answer = {
        "choices": [{"message": {"content": text}}],
        "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
    }
    row = PlantedRow()
    _count(row, own, [own, other], 200, answer, 100, 10.0, 5.0)
    assert row == replace(PlantedRow(asked=1, answered=1, repeats=1), **expected)


def test_what_a_client_is_refused_is_no_answer():
    row = PlantedRow()
    _count(row, _Prompt("a", "", "x", []), [], 503, {}, 0, 1.0, None)
    assert row == PlantedRow(asked=1, statuses={503: 1})


@contextmanager
def address(server):
    yield RunningServer(server.url, "tiny", SimpleNamespace(pid=0), {"ignore_eos": True})


@pytest.fixture
def start(endless_folder, cold_dir, tmp_path):
    Store.create(tmp_path / "store", 1 << 26)

    @contextmanager
    def started():
        with (
            Store(tmp_path / "store") as store,
            running(endless_folder, cold_dir, store=store) as server,
            address(server) as own,
        ):
            yield own

    return started


def test_a_restart_finds_what_was_stored(start):
    said = []
    row = measure_restart(start, DOCUMENT, 2, said.append)
    assert len(said) == len(row.stored_seconds) == len(row.new_seconds) == 2
    assert min(row.cached_tokens) > 0.9 * len(DOCUMENT)
    # What is read anew is not found, and is no shorter.
    assert max(row.new_cached_tokens) < 64
    assert min(row.prompt_tokens) > len(DOCUMENT)


def test_without_a_store_no_prompt_counts_as_stored(tiny_server):
    with address(tiny_server) as own, connected(own) as client:
        with pytest.raises(ServerError, match="were found in the store"):
            client.store(DOCUMENT)
        assert client.ask(DOCUMENT, 4).cached_tokens == 0
        assert min(measure_cost(client, ["the cat"], 1).own_ms) > 0


def test_a_burst_counts_all_tokens_over_the_time_of_all():
    one = Answer(0.0, 1.0, 3.0, (1.0, 2.0, 3.0), 3, 9, 0, None)
    late = Answer(0.5, 2.0, 4.0, (2.0, 3.0, 4.0), 3, 9, 0, None)
    assert Burst((one,)).rate == pytest.approx(3 / 3)
    assert Burst((one, late)).rate == pytest.approx(6 / 4)
    # Behind 2.0 came one of the first and two of the second.
    assert Burst((one, late)).decode_rate == pytest.approx(3 / 2)


def streams(*eight):
    rates = {1: [10.0] * 3, 4: [25.0] * 3, 8: list(eight)}
    return StreamsRow(rates, rates, {count: [0.1] * 3 for count in rates}, peak_bytes=100)


def goals(**rows):
    return {one.name: one for one in Measured(**rows).goals()}


def test_goals_of_streams():
    made = goals(streams=streams(31.0, 31.0, 31.0))
    assert made["speedup_4_streams"].reached == 2.5
    assert made["speedup_4_streams"].is_met
    assert made["speedup_8_streams"].is_met
    assert not goals(streams=streams(29.0, 29.0, 29.0))["speedup_8_streams"].is_met
    noisy = goals(streams=streams(31.0, 50.0, 90.0))["speedup_8_streams"]
    assert noisy.is_noisy
    assert not noisy.is_met


def test_the_loop_s_tokens_lie_where_the_model_computes():
    asked = []

    class Model:
        device = torch.device("meta")

        def __call__(self, **given):
            asked.append((given["input_ids"].device.type, len(given["input_ids"])))

    row = measure_limit(Model(), (1, 4), 2, lambda _: None)
    assert set(asked) == {("meta", 1), ("meta", 4)}
    assert {count: len(seconds) for count, seconds in row.step_seconds.items()} == {1: 2, 4: 2}


def test_goals_of_streams_say_what_the_loop_allows():
    limit = LimitRow({1: [0.04, 0.05, 0.03], 4: [0.1] * 3, 8: [0.1] * 3})
    made = goals(streams=streams(31.0, 31.0, 31.0), limit=limit)
    figures = Measured(limit=limit).figures()
    assert figures == pytest.approx({"limit_4_streams": 1.6, "limit_8_streams": 3.2})
    # Of a goal beyond what is possible it says how much of that was reached.
    assert made["speedup_4_streams"].share_of_allowed == pytest.approx(2.5 / 1.6)
    assert made["speedup_8_streams"].share_of_allowed is None


def test_goals_of_first_tokens_and_health():
    made = goals(
        cost=CostRow([0.13] * 9, [0.1] * 9),
        health=HealthRow([0.01] * 200, 0),
        restart=RestartRow([0.5] * 3, [0.4] * 3, [6.0] * 3),
    )
    assert made["own_first_token_ms_p95"].reached == pytest.approx(30)
    assert made["first_token_after_restart_share"].reached == pytest.approx(0.5 / 6)
    names = ("own_first_token_ms_p95", "health_p99_ms", "first_token_after_restart_share")
    assert all(made[name].is_met for name in names)
    worse = goals(
        cost=CostRow([0.13] * 9 + [0.4], [0.1] * 10),
        health=HealthRow([0.01] * 200, 1),
        restart=RestartRow([0.7] * 3, [0.4] * 3, [6.0] * 3),
    )
    assert not any(worse[name].is_met for name in names)
    assert worse["health_p99_ms"].why == "1 were not 200"


def test_a_part_that_fails_says_why():
    failed = Measured(failed={Part.RESTART.value: "it did not start"})
    (goal,) = [one for one in failed.goals() if one.name == "first_token_after_restart_share"]
    assert goal.is_met is None
    assert goal.why == "it did not start"
    assert [*failed.lines()] == ["restart failed: it did not start"]
