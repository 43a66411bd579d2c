# SPDX-License-Identifier: Apache-2.0
"""Our server beside others: real ones of tiny models, and what their rows say of each other."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from hillinfer_bench.serving.beside.open_context import HeldRow, OpenContextRow, held_by
from hillinfer_bench.serving.beside.rival_servers import RIVALS, Setting
from hillinfer_bench.serving.beside.rivals import FirstTokens, RivalsRow, ServerRow
from hillinfer_bench.serving.measures import StreamsRow
from hillinfer_bench.serving.run import Measured
from hillinfer_bench.serving.servers import RunningServer, server_process


@pytest.mark.bench
def test_both_parts_of_the_command(command, warm_python, endless_folder, tmp_path):
    """Ours and `transformers serve` answer; who is not installed is named with what to do."""
    out, place = tmp_path / "serve.json", tmp_path / "place"
    told = command(
        *("serving", "--model", endless_folder, "--dir", place, "--out", out, "--rounds", 1),
        *("--part", "rivals", "--part", "open_context", "--peers", tmp_path / "none"),
        *("--server", "transformers_serve", "--server", "llama_cpp"),
        *("--prompt-tokens", 100, "--document-tokens", 200, "--new-tokens", 4, "--questions", 2),
        *("--documents", 12, "--open-tokens", 1500, "--budget-documents", 6),
        *("--python", shlex.join(warm_python)),
    )
    assert told.code == 0, told.err
    record = json.loads(out.read_text())
    assert record["failed"] == {}
    rows = record["rivals"]["servers"]
    assert [*rows] == ["hillinfer", "transformers_serve", "llama_cpp"]
    for name in ("hillinfer", "transformers_serve"):
        row = rows[name]
        assert row["missing"] is None, row["missing"]
        # Answers of one length, whichever server gave them.
        assert row["streams"]["answer_tokens"] == [4] * 8
        taken = {kind: len(row[kind]["seconds"]) for kind in ("read", "again", "restarted")}
        assert taken == {"read": 1, "again": 2, "restarted": 1}
        assert row["peak_bytes"] > 0
    # Ours finds the document again on a server that has just started, and it alone does.
    ours, theirs = rows["hillinfer"]["restarted"], rows["transformers_serve"]["restarted"]
    assert ours["cached_tokens"][0] > 0.9 * 200
    assert theirs["cached_tokens"] == [0]
    assert "make serve-peers" in rows["llama_cpp"]["missing"]
    assert "make serve-peers" in told.out
    assert record["missing_servers"] == {"llama_cpp": rows["llama_cpp"]["missing"]}
    assert record["first_token_after_restart_servers"] == 2
    ratios = record["vs_transformers_serve"]
    assert ratios["peak_memory"] == pytest.approx(
        rows["transformers_serve"]["peak_bytes"] / rows["hillinfer"]["peak_bytes"]
    )
    opened = record["open_context"]
    assert opened["refused"] == []
    assert len(opened["alone"]) == len(opened["together"]) == opened["documents"] == 12
    assert min(opened["document_tokens"]) > 1500
    assert opened["row_bytes"] > 1.9 * opened["budget_bytes"]
    assert 0 < opened["most_dram_bytes"] <= opened["budget_bytes"]
    assert record["goals"]["open_context_unanswered"]["is_met"]
    assert record["goals"]["open_context_above_budget_bytes"]["is_met"]
    assert [*place.iterdir()] == []


def test_a_servers_most_memory_is_that_of_all_its_processes(tmp_path):
    """Of what it started, too, and of what is given back by then."""
    stays = "print(flush=True); import time; time.sleep(60)"
    filled = f"a = b'1' * (64 << 20); del a; {stays}"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {filled!r}])"
    for program, least in ((filled, 64), (stays, 0), (starts, 64)):
        with server_process(
            [sys.executable, "-c", program], tmp_path / "log", subprocess.PIPE
        ) as process:
            process.stdout.readline()
            told = RunningServer("http://127.0.0.1:1", "tiny", process).peak_bytes
        assert least << 20 < told < (least + 48) << 20


def streams(rate, first):
    rates = {1: [rate], 4: [rate], 8: [rate]}
    return StreamsRow(rates, rates, {count: [first, 3 * first] for count in rates})


def server(name, rate=10.0, first=0.1, restarted=0.2, peak=100, **more):
    return ServerRow(
        name,
        streams=streams(rate, first),
        read=FirstTokens([2.0], [6000], [0]),
        restarted=FirstTokens([restarted], [6000], [0]),
        peak_bytes=peak,
        **more,
    )


def rivals(*others):
    named = {one.name: one for one in others}
    return RivalsRow({"hillinfer": server("hillinfer"), **named}, 8)


def goals(row):
    return {one.name: one for one in Measured(rivals=row).goals()}


def test_figures_say_how_far_ours_is_ahead():
    figures = rivals(server("transformers_serve", 5.0, 0.4, 4.0, 300)).figures()
    ratios = figures["vs_transformers_serve"]
    assert ratios["tokens_per_second_4_streams"] == pytest.approx(2)
    assert ratios["first_token_8_streams_p50"] == pytest.approx(4)
    assert ratios["first_token_after_restart_p50"] == pytest.approx(20)
    assert ratios["peak_memory"] == pytest.approx(3)
    assert ratios["first_token_new_document_p95"] == pytest.approx(1)


def test_the_least_ratio_is_the_goal_and_is_named():
    ahead = rivals(server("transformers_serve", 5.0, 0.4, 4.0, 300))
    assert goals(ahead)["least_vs_transformers_serve"].is_met
    behind = rivals(server("transformers_serve", 5.0, 0.4, 4.0, 60))
    goal = goals(behind)["least_vs_transformers_serve"]
    assert goal.reached == pytest.approx(0.6)
    assert not goal.is_met
    assert goal.why == "behind in peak_memory"


def test_the_rank_counts_who_is_sooner():
    slow, quick = server("slow", restarted=4.0), server("quick", restarted=0.1)
    assert rivals(slow).figures()["first_token_after_restart_rank"] == 1
    assert rivals(slow, quick).figures()["first_token_after_restart_rank"] == 2
    assert not goals(rivals(slow, quick))["first_token_after_restart_rank"].is_met
    # What somebody brings back by hand is told beside it.
    helped = replace(slow, by_hand=FirstTokens([0.1], [6000], [5990]))
    figures = rivals(helped).figures()
    assert figures["first_token_after_restart_rank"] == 1
    assert figures["first_token_after_restart_rank_by_hand"] == 2


def test_goals_of_open_context():
    all_of_them, others = [None] * 30, [HeldRow("other", 2, "a cache")]
    answers = {"alone": all_of_them, "together": all_of_them, "rivals": others}
    row = OpenContextRow(30, budget_bytes=100.0, most_dram_bytes=100.0, **answers)
    made = {one.name: one for one in Measured(open_context=row).goals()}
    names = [name for name in made if name.startswith("open_context")]
    assert len(names) == 3
    assert all(made[name].is_met for name in names)
    others = [HeldRow("other", 30, "a cache")]
    worse = replace(row, alone=[None] * 29, most_dram_bytes=101.0, rivals=others)
    made = {one.name: one for one in Measured(open_context=worse).goals()}
    assert not any(made[name].is_met for name in names)
    assert made["open_context_unanswered"].reached == 1


def test_what_rivals_hold_is_computed_of_their_own_number_types(tmp_path):
    setting = Setting("m", tmp_path, "float32", 2, 8, 1024, 4000 * 100 * 2, 100, tmp_path, tmp_path)
    held = {kind.key: held_by(kind, setting, [], 1000, print) for kind in RIVALS}
    documents = {key: row.held_documents for key, row in held.items()}
    # The one keeps no prompt; one has rows of two bytes, and one of four.
    assert documents == {"transformers_serve": 0, "llama_cpp": 4, "vllm": 2}
    narrow = replace(setting, number_type="bfloat16")
    assert held_by(RIVALS[2], narrow, [], 1000, print).held_documents == 4
    assert "make serve-peers" in held["vllm"].missing


def test_what_this_command_says_of_threads_is_not_handed_on(monkeypatch, tmp_path):
    """A rival's threads wait as it has them wait, and their number is given."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("OF_A_USER", "1")
    telling = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    told = []
    for kept_back in (("OMP_",), ()):
        with server_process(
            telling, tmp_path / "log", subprocess.PIPE, {"OMP_NUM_THREADS": "2"}, kept_back
        ) as process:
            told.append(json.loads(process.stdout.read()))
    assert [one["OF_A_USER"] for one in told] == ["1", "1"]
    assert [one["OMP_NUM_THREADS"] for one in told] == ["2", "2"]
    assert ["OMP_WAIT_POLICY" in one for one in told] == [False, True]
