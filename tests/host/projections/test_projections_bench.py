# SPDX-License-Identifier: Apache-2.0
"""The tool behind `make projections`, on a tiny model."""

import importlib
import json

import pytest

from hillinfer.projections.ways import PROJECTIONS


@pytest.fixture(scope="module")
def tool():
    return importlib.import_module("projections_bench")


@pytest.fixture(scope="module")
def report(tool, tiny_folder, tmp_path_factory):
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
        spreads = [row[name]["spread"] for name in ("step_ms", "linear_ms")]
        assert row["flagged"] is (max(spreads) > 0.2)
    assert report["label"] == f"measured on {report['processor']}, 1 threads"


def test_times_that_lie_apart_are_flagged(tool):
    steady = tool.Times.of([(1.0, 2.0), (1.05, 2.0), (1.1, 2.0)])
    assert (steady.fastest, steady.median, steady.fastest_cpu) == (1000.0, 1050.0, 2000.0)
    # Between the 10th and the 90th percentile, over the median.
    assert steady.spread == pytest.approx(0.08 / 1.05)
    assert not steady.flagged
    assert tool.Times.of([(1.0, 2.0), (1.05, 2.0), (1.4, 2.0)]).flagged


def test_stock_is_what_quality_is_compared_with(report):
    rows = {
        (row["dtype"], row["projections"]): row for row in report["rows"] if "skipped" not in row
    }
    assert rows["float32", "stock"]["kl_divergence"] == 0
    assert rows["float32", "fused"]["kl_divergence"] < 1e-6
    # The twin: rounding weights must show.
    assert rows["float32", "int8"]["kl_divergence"] > 1e-6
