# SPDX-License-Identifier: Apache-2.0
"""`make beta` compares caches that differ in β alone, and takes `auto` for what it did."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hillinfer.app.profiling import Profiling
from hillinfer.app.rates import Rates
from hillinfer.native.library import HOW_TO_BUILD, native_is_here

pytestmark = pytest.mark.skipif(
    not native_is_here(), reason=f"the native library is not built: {HOW_TO_BUILD}"
)


@pytest.fixture(scope="module")
def sweep():
    path = Path(__file__).parents[3] / "tools" / "beta_sweep.py"
    spec = importlib.util.spec_from_file_location("beta_sweep", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["beta_sweep"] = module
    spec.loader.exec_module(module)
    return module


def test_the_grid_has_both_ends(sweep):
    assert sweep.grid(32, 9) == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    assert sweep.grid(3, 9) == [0, 1, 2, 3]
    assert sweep.grid(1, 9) == [0, 1]


def made_report(sweep, monkeypatch, seconds):
    """Return the report of contenders that took these seconds, each with one segment more."""
    monkeypatch.setattr(sweep, "rates_of", lambda _: Rates(1e6, 1e6, 1e7, 1e5))
    shape = SimpleNamespace(layers=1)
    made = SimpleNamespace(segments=8, segment_tokens=1024, shape=shape)
    turns = {
        name: sweep.Turns(host, taken, 0.1, 1.0)
        for host, (name, taken) in enumerate(seconds.items())
    }
    return sweep.report(made, turns)


STEADY = {
    "0": [1.0] * 4, "4": [0.8] * 4, "auto": [1.0] * 4, "auto parallel": [0.82] * 4,
    "auto two_links": [1.2] * 4,
}  # fmt: skip


def test_regret_is_what_a_choice_costs_over_the_best(sweep, monkeypatch):
    made = made_report(sweep, monkeypatch, STEADY)
    assert made["beta_regret"] == pytest.approx(0.25)
    assert (made["best_row"], made["best_host_segments"], made["chosen_host_segments"]) == (
        "4", 1, 2,
    )  # fmt: skip
    assert [row["name"] for row in made["rows"]] == ["0", "4", "auto"]
    regrets = {one["model"]: one["beta_regret"] for one in made["models"]}
    assert regrets == {
        "scores_then_rows": pytest.approx(0.25),
        "parallel": pytest.approx(0.025),
        "two_links": pytest.approx(0.5),
    }
    assert made["goals"] == [
        {
            "goal": "beta_regret of 0.05 or less, --beta-model scores_then_rows",
            "reached": pytest.approx(0.25), "row": "auto", "met": False, "flagged": False,
        }
    ]  # fmt: skip


def test_the_best_may_be_what_another_model_chose(sweep, monkeypatch):
    made = made_report(sweep, monkeypatch, STEADY | {"auto parallel": [0.5] * 4})
    assert made["best_row"] == "auto parallel"
    assert made["beta_regret"] == pytest.approx(1.0)


@pytest.mark.parametrize("restless", ["auto", "4"])
def test_a_goal_is_not_met_by_steps_that_spread(sweep, monkeypatch, restless):
    near = STEADY | {"auto": [0.81] * 4}
    goal = made_report(sweep, monkeypatch, near)["goals"][0]
    assert (goal["met"], goal["flagged"]) == (True, False)
    spread = near | {restless: [near[restless][0], 1.0, 1.1, 1.2]}
    made = made_report(sweep, monkeypatch, spread)
    assert made["beta_regret"] < 0.05
    assert (made["goals"][0]["met"], made["goals"][0]["flagged"]) == (False, True)
    assert [row["name"] for row in made["rows"] if row["flagged"]] == [restless]


def test_a_small_sweep(sweep, monkeypatch, tmp_path, cold_dir, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Profiling, "rates", lambda self: Rates(2e6, 1e6, 1e7, 1e5))
    orders = []

    def in_turn(names, turn, of=sweep.in_turn):
        orders.append(of(names, turn))
        return orders[-1]

    monkeypatch.setattr(sweep, "in_turn", in_turn)
    out = tmp_path / "reports" / "beta.json"
    monkeypatch.setattr(sys, "argv", [
        "beta_sweep.py", "--shape", "smollm2-135m", "--layers", "1", "--tokens", "3072",
        "--points", "9", "--rounds", "2", "--out", str(out), "--cold-dir", str(cold_dir),
    ])  # fmt: skip
    sweep.main()
    made = json.loads(out.read_text())
    assert orders == [
        ["0", "1", "2", "3", "auto", "auto parallel", "auto two_links"],
        ["1", "2", "3", "auto", "auto parallel", "auto two_links", "0"],
    ]
    hosts = [row["host_segments"] for row in made["rows"]]
    # Each cache did what its name says, and twice as fast a host took two of three.
    assert hosts == [0, 1, 2, 3, 2]
    assert [row["name"] for row in made["rows"]] == ["0", "1", "2", "3", "auto"]
    assert made["chosen_host_segments"] == 2
    # Rows of this drive cost what scoring does: the paper's models give its side less.
    assert [(one["model"], one["chosen_host_segments"]) for one in made["models"]] == [
        ("scores_then_rows", 2), ("parallel", 3), ("two_links", 3),
    ]  # fmt: skip
    assert [row["host_segments"] for row in made["rows_of_models"]] == [3, 3]
    assert [one["row"] for one in made["goals"]] == ["auto"]
    modelled = [row["modelled_seconds"]["scores_then_rows"] for row in made["rows"]]
    assert min(modelled) == modelled[2] == modelled[-1] < modelled[1]
    assert made["label"].startswith("measured: device core")
    assert "auto takes 2, the best is" in capsys.readouterr().out
