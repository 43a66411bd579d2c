# SPDX-License-Identifier: Apache-2.0
"""Memory stays at M0 while many times as many rows go to the drive (`make space`, in small)."""

import ctypes
import gc
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.runtime import Runtime
from hillinfer.settings import Settings

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
    shape = ModelShape(
        layers=2,
        kv_heads=tool.KV_HEADS,
        query_heads=tool.QUERY_HEADS,
        head_dim=tool.HEAD_DIM,
        stored_type=StoredType.BFLOAT16,
        max_positions=TOKENS + 1,
    )
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


def test_the_tool_writes_a_report(tmp_path, cold_dir):
    out = tmp_path / "space.json"
    arguments = ["--tokens", "2048", "--layers", "1", "--steps", "1", "--dram-budget", "40MiB"]
    subprocess.run(
        [sys.executable, TOOL, *arguments, "--cold-dir", cold_dir, "--out", out], check=True
    )
    report = json.loads(out.read_text())
    assert report["tokens"] == 2048
    assert report["label"].startswith("measured")
    assert len(report["growth_after_chunks"]) == 2


def test_steps_at_rising_contexts(tmp_path, cold_dir):
    out = tmp_path / "lengths.json"
    arguments = ["--lengths", "2048", "4096", "--layers", "1", "--steps", "1", "--alpha", "0.5"]
    arguments += ["--max-selected", "64", "--dram-budget", "40MiB"]
    subprocess.run(
        [sys.executable, TOOL, *arguments, "--cold-dir", cold_dir, "--out", out], check=True
    )
    report = json.loads(out.read_text())
    assert [point["tokens"] for point in report["points"]] == [2050, 4098]
    # INT8 or narrower: codes and an exponent for each of 8 heads of 128 channels.
    first, second = report["points"]
    assert second["shadow_bytes"] - first["shadow_bytes"] in (
        2048 * 8 * (128 // part + 1) for part in (1, 2, 4)
    )
    assert report["statistics"]["selected_tokens"] == 4 * 64


def test_contexts_that_fall_are_refused(tmp_path):
    arguments = ["--lengths", "4096", "2048", "--out", tmp_path / "space.json"]
    ended = subprocess.run(
        [sys.executable, TOOL, *arguments], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "--lengths [4096, 2048] must rise" in ended.stderr


def points(*seconds):
    return [
        {"shadow_bytes": 1000 * 4**i, "cpu_seconds_per_step": one} for i, one in enumerate(seconds)
    ]


def test_the_line_through_steps_says_what_it_does_not_explain(tool):
    line = tool.line_through(points(3.0, 6.0, 18.0))
    assert line["fixed_seconds"] == pytest.approx(2.0)
    assert line["shadow_bytes_per_second"] == pytest.approx(1000.0)
    assert line["largest_unexplained_share"] == pytest.approx(0.0, abs=1e-9)
    # What grows with the square of the context is no line.
    assert tool.line_through(points(3.0, 18.0, 258.0))["largest_unexplained_share"] > 0.3
