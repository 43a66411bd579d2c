# SPDX-License-Identifier: Apache-2.0
"""`make beta` compares caches that differ in β alone, and takes `auto` for what it did."""

import importlib.util
import json
import sys
from pathlib import Path

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


def test_a_small_sweep(sweep, monkeypatch, tmp_path, cold_dir, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Profiling, "rates", lambda self: Rates(2e6, 1e6, 1e7, 1e5))
    out = tmp_path / "reports" / "beta.json"
    monkeypatch.setattr(sys, "argv", [
        "beta_sweep.py", "--shape", "smollm2-135m", "--layers", "1", "--tokens", "3072",
        "--points", "9", "--rounds", "2", "--out", str(out), "--cold-dir", str(cold_dir),
    ])  # fmt: skip
    sweep.main()
    made = json.loads(out.read_text())
    hosts = [row["host_segments"] for row in made["rows"]]
    # Each cache did what its name says, and twice as fast a host took two of three.
    assert hosts == [0, 1, 2, 3, 2]
    assert [row["name"] for row in made["rows"]] == ["0", "1", "2", "3", "auto"]
    assert made["chosen_host_segments"] == 2
    seconds = [row["seconds"] for row in made["rows"]]
    assert made["beta_regret"] == seconds[-1] / min(seconds) - 1 >= 0
    modelled = [row["modelled_seconds"]["scores_then_rows"] for row in made["rows"]]
    assert min(modelled) == modelled[2] == modelled[-1] < modelled[1]
    assert made["label"].startswith("measured: device core")
    assert "auto takes 2, the best is" in capsys.readouterr().out
