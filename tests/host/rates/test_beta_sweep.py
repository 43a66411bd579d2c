# SPDX-License-Identifier: Apache-2.0
"""`make beta` compares caches that differ in β alone, and takes `auto` for what it did."""

import importlib
import json
from types import SimpleNamespace

import pytest
from device_cases import plant

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.rates.kept_rates import Rates
from hillinfer.settings import Settings


@pytest.fixture(scope="module")
def sweep():
    return importlib.import_module("beta_sweep")


def test_the_grid_has_both_ends(sweep):
    assert sweep.grid(32, 9) == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    assert sweep.grid(3, 9) == [0, 1, 2, 3]
    assert sweep.grid(1, 9) == [0, 1]


def made_report(sweep, seconds):
    """Return the report of contenders that took these seconds, each with one segment more."""
    shape = SimpleNamespace(layers=1)
    made = SimpleNamespace(segments=8, segment_tokens=1024, shape=shape)
    turns = {
        name: sweep.Turns(host, taken, 0.1, 1.0)
        for host, (name, taken) in enumerate(seconds.items())
    }
    return sweep.report(made, turns, Rates(1e6, 1e6, 1e7, 1e5))


STEADY = {
    "0": [1.0] * 4, "4": [0.8] * 4, "auto": [1.0] * 4, "auto parallel": [0.82] * 4,
    "auto two_links": [1.2] * 4,
}  # fmt: skip


def test_regret_is_what_a_choice_costs_over_the_best(sweep):
    made = made_report(sweep, STEADY)
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


def test_the_best_may_be_what_another_model_chose(sweep):
    made = made_report(sweep, STEADY | {"auto parallel": [0.5] * 4})
    assert made["best_row"] == "auto parallel"
    assert made["beta_regret"] == pytest.approx(1.0)


@pytest.mark.parametrize("restless", ["auto", "4"])
def test_a_goal_is_not_met_by_steps_that_spread(sweep, restless):
    near = STEADY | {"auto": [0.81] * 4}
    goal = made_report(sweep, near)["goals"][0]
    assert (goal["met"], goal["flagged"]) == (True, False)
    spread = near | {restless: [near[restless][0], 1.0, 1.1, 1.2]}
    made = made_report(sweep, spread)
    assert made["beta_regret"] < 0.05
    assert (made["goals"][0]["met"], made["goals"][0]["flagged"]) == (False, True)
    assert [row["name"] for row in made["rows"] if row["flagged"]] == [restless]


def test_another_contender_begins_each_round(sweep):
    order = []

    class Steps(SimpleNamespace):
        def step(self):
            order.append(self.name)
            return len(order)

        def turns(self, seconds):
            return seconds

        def close(self):
            pass

    made = SimpleNamespace(
        segments=3,
        fixed=lambda beta: Steps(name=f"{beta:.1f}"),
        chosen=lambda model: Steps(name=model.value),
    )
    found = sweep.measure(made, [0, 1, 2, 3], 2)
    # Each has taken a step before any is measured.
    first, second, third = order[:7], order[7:14], order[14:]
    assert first == second
    assert first[:3] == ["0.0", "0.5", "2.0"]
    assert len(set(first)) == 7
    assert third == [*first[1:], first[0]]
    assert list(found) == ["0", "1", "2", "3", "auto", "auto parallel", "auto two_links"]
    assert found["0"] == [8, 21]


def test_a_small_sweep(sweep, monkeypatch, tmp_path, cold_dir, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = ModelShape(1, *sweep.SHAPES["smollm2-135m"], StoredType.FLOAT16, 2 * 3072)
    settings = Settings().changed(device="core", max_selected=512)
    plant(Rates(2e6, 1e6, 1e7, 1e5), shape, settings, cold_dir)
    out = tmp_path / "reports" / "beta.json"
    sweep.main([
        "--shape", "smollm2-135m", "--layers", "1", "--tokens", "3072", "--points", "9",
        "--rounds", "2", "--out", str(out), "--cold-dir", str(cold_dir),
    ])  # fmt: skip
    made = json.loads(out.read_text())
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
