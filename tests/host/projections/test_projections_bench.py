# SPDX-License-Identifier: Apache-2.0
"""The tool behind `make projections`, on a tiny model."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from hillinfer.hf.projections.table import PROJECTIONS

TOOL = Path(__file__).parents[3] / "tools/projections_bench.py"


@pytest.fixture(scope="module")
def report(tiny_folder, tmp_path_factory):
    spec = importlib.util.spec_from_file_location("projections_bench", TOOL)
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    out = tmp_path_factory.mktemp("reports") / "projections.json"
    tool.main(
        [
            *("--model", str(tiny_folder), "--out", str(out), "--rounds", "1", "--steps", "2"),
            *("--context", "40", "--last", "8", "--texts", "1", "--threads", "1"),
        ]
    )
    return json.loads(out.read_text())


def test_every_type_and_way_has_a_row_or_a_reason(report):
    named = {(row["dtype"], row["projections"]) for row in report["rows"]}
    assert named == {(dtype, name) for dtype in ("float32", "bfloat16") for name in PROJECTIONS}
    for row in report["rows"]:
        if "skipped" in row:
            assert row["projections"] in row["skipped"]
            continue
        assert row["step_ms"]["fastest"] <= row["step_ms"]["median"]
        assert row["rest_ms"] == row["step_ms"]["fastest"] - row["linear_ms"]["fastest"]


def test_stock_is_what_quality_is_compared_with(report):
    rows = {
        (row["dtype"], row["projections"]): row for row in report["rows"] if "skipped" not in row
    }
    assert rows["float32", "stock"]["kl_divergence"] == 0
    assert rows["float32", "fused"]["kl_divergence"] < 1e-6
    # The twin: rounding weights must show.
    assert rows["float32", "int8"]["kl_divergence"] > 1e-6
