# SPDX-License-Identifier: Apache-2.0
"""Memory stays at M0 while many times as many rows go to the drive (`make space`, in small)."""

import ctypes
import gc
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from hillinfer.engine.runtime import Runtime
from hillinfer.settings import Settings
from random_rows import model_shape

TOOL = Path(__file__).parents[3] / "tools" / "space.py"
TOKENS = 8192
MIB = 1 << 20
# Rows of the chunk at hand in torch's hands, and what Python takes for thousands of positions.
SLACK = 16 * MIB


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("space", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Hoarder(Runtime):
    """Keeps every row in memory as well."""

    def append(self, layer, sequence, keys, values):
        self.hoard = [*getattr(self, "hoard", []), keys.clone(), values.clone()]
        super().append(layer, sequence, keys, values)


def grown(tool, cold_dir, kind):
    shape = model_shape(2, TOKENS + 1)
    settings = Settings().changed(alpha=0.02, shadow="int2", block_rows=128)
    # What tests before this one freed would be taken again without growing the process.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    runtime = kind(shape, settings, 24 * MIB, cold_dir, shadow_limit_bytes=MIB)
    try:
        return tool.fill_and_decode(runtime, TOKENS, 1)
    finally:
        runtime.close()


def test_memory_is_flat(tool, cold_dir):
    result = grown(tool, cold_dir, Runtime)
    statistics = result["statistics"]
    assert statistics["kv_bytes"] >= 64 * MIB
    assert statistics["shadow_read_bytes"] > 0
    assert statistics["dram_peak_bytes"] <= 24 * MIB
    assert result["growth_bytes"] < 24 * MIB + SLACK


def test_a_runtime_that_hoards_rows_is_seen(tool, cold_dir):
    assert grown(tool, cold_dir, Hoarder)["growth_bytes"] > 24 * MIB + SLACK


def test_the_tool_writes_a_report(tmp_path, cold_dir, warm_python):
    out = tmp_path / "space.json"
    arguments = ["--tokens", "2048", "--layers", "1", "--steps", "1", "--dram-budget", "40MiB"]
    subprocess.run(
        [*warm_python, TOOL, *arguments, "--cold-dir", cold_dir, "--out", out], check=True
    )
    report = json.loads(out.read_text())
    assert report["tokens"] == 2048
    assert report["label"].startswith("measured")
    assert len(report["growth_after_chunks"]) == 2


def test_steps_at_rising_contexts(tmp_path, cold_dir, warm_python):
    out = tmp_path / "lengths.json"
    arguments = ["--lengths", "2048", "4096", "--layers", "1", "--steps", "2", "--alpha", "0.5"]
    arguments += ["--max-selected", "64", "--dram-budget", "64MiB", "--scorer-mebibytes", "1"]
    ended = subprocess.run(
        [*warm_python, TOOL, *arguments, "--cold-dir", cold_dir, "--out", out],
        check=True,
        capture_output=True,
        text=True,
    )
    report = json.loads(out.read_text())
    # In turns at each context.
    assert [(point["shadow"], point["tokens"]) for point in report["points"]] == [
        (shadow, tokens) for tokens in (2052, 4100) for shadow in ("int8", "int4")
    ]
    for shadow, part in (("int8", 1), ("int4", 2)):
        first, second = [one for one in report["points"] if one["shadow"] == shadow]
        # Codes and an exponent for each of 8 heads of 128 channels.
        assert second["shadow_bytes"] - first["shadow_bytes"] == 2048 * 8 * (128 // part + 1)
        assert report["scorer_alone"][shadow]["layer_bytes_per_token"] == 8 * (128 // part + 1)
        assert report["statistics"][shadow]["selected_tokens"] == 8 * 64
    for point in report["points"]:
        assert point["selected_tokens_of_last_step"] == 64
        for name in ("seconds_per_step", "cpu_seconds_per_step", "scoring_seconds"):
            assert 0 < point[name]["minimum"] <= point[name]["median"]
            assert point[name]["flagged"] is (point[name]["spread"] > 0.2)
        assert point["dram_peak_bytes"] <= point["dram_budget_bytes"] == 64 * MIB
        assert sum(point["beyond_m0_named"].values()) == point["beyond_m0_bytes"]
        assert point["beyond_m0_named"]["token_ids"] == 2 * 4 * point["tokens"]
    assert report["label"].startswith("measured")
    for fits in report["growth"].values():
        for fit in fits.values():
            for one in fit["formats"]:
                assert one["unexplained_share"] >= 0
    # So short contexts tell nothing of the goal.
    assert [goal["met"] for goal in report["goals"]] == [None] * 4
    assert report["goals"][0]["reached"] is not None
    assert ended.stdout.count("not judged") == 4


def test_a_shadow_that_would_be_streamed_is_refused(tmp_path, cold_dir, warm_python):
    out = tmp_path / "lengths.json"
    arguments = ["--lengths", "2048", "65536", "--layers", "1", "--dram-budget", "80MiB"]
    ended = subprocess.run(
        [*warm_python, TOOL, *arguments, "--cold-dir", cold_dir, "--out", out],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "of the int8 shadow would be read from the drive at every step" in ended.stderr
    assert not out.exists()


def test_contexts_that_fall_are_refused(tmp_path, warm_python):
    arguments = ["--lengths", "4096", "2048", "--out", tmp_path / "space.json"]
    ended = subprocess.run(
        [*warm_python, TOOL, *arguments], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "--lengths [4096, 2048] must rise" in ended.stderr
