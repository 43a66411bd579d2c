# SPDX-License-Identifier: Apache-2.0
"""Measures, table and report, by hand."""

import json
import math

import pytest
import torch

from hillinfer.system.files import ReportError, prepare_report
from hillinfer_bench.quality.table import (
    FULL_CACHE,
    Measures,
    QualityRow,
    measure,
    table_text,
    write_report,
)


def logits_of(*probabilities):
    return torch.log(torch.tensor(probabilities, dtype=torch.float32))


FULL = logits_of([0.5, 0.25, 0.25], [0.1, 0.8, 0.1])


def test_the_full_cache_against_itself():
    found = measure(FULL, FULL, [1, 1])
    assert found.negative_log_likelihood == pytest.approx(-math.log(0.25 * 0.8) / 2, rel=1e-6)
    assert found.kl_divergence == 0.0
    assert found.agreement == 1.0


def test_another_distribution():
    other = logits_of([0.25, 0.5, 0.25], [0.1, 0.8, 0.1])
    found = measure(other, FULL, [0, 2])
    assert found.negative_log_likelihood == pytest.approx(-math.log(0.25 * 0.1) / 2, rel=1e-6)
    # Only the first step differs: .5 log(.5/.25) + .25 log(.25/.5).
    assert found.kl_divergence == pytest.approx(0.25 * math.log(2) / 2, rel=1e-6)
    assert found.agreement == 0.5


def test_logits_need_no_normalisation():
    assert measure(FULL + 3, FULL, [1, 1]) != measure(FULL[:, [1, 0, 2]], FULL, [1, 1])
    shifted, plain = measure(FULL + 3, FULL, [1, 1]), measure(FULL, FULL, [1, 1])
    assert shifted.kl_divergence == pytest.approx(0, abs=1e-7)
    assert shifted.negative_log_likelihood == pytest.approx(plain.negative_log_likelihood)


def rows():
    full = (Measures(math.log(8), 0.0, 1.0), Measures(math.log(2), 0.0, 1.0))
    sparse = (Measures(math.log(16), 0.03, 0.9), Measures(math.log(4), 0.01, 0.7))
    return [QualityRow(FULL_CACHE, 1.0, full, full), QualityRow("sparse", 0.1, sparse, full)]


def test_a_row_is_the_mean_over_texts():
    full, sparse = rows()
    assert full.perplexity == pytest.approx(4)
    assert full.perplexity_against_full == 0
    assert sparse.perplexity == pytest.approx(8)
    assert sparse.perplexity_against_full == pytest.approx(1)
    assert sparse.kl_divergence == pytest.approx(0.02)
    assert sparse.kl_standard_error == pytest.approx(0.01)
    assert sparse.agreement == pytest.approx(0.8)


def test_one_text_has_no_spread():
    full, _ = rows()
    assert math.isnan(QualityRow("one", 0.1, full.measures[:1], full.full[:1]).kl_standard_error)


def test_the_table_is_aligned_markdown():
    lines = table_text(rows()).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == [
        "0.1",
        "sparse",
        "8.000",
        "+100.00%",
        "0.0200",
        "0.0100",
        "0.800",
    ]


def test_the_report_holds_every_figure(tmp_path):
    file = tmp_path / "reports" / "quality.json"
    prepare_report(file, "--out")
    write_report(file, rows(), {"model": "some"})
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["label"], report["model"]) == ("measured", "some")
    assert [row["configuration"] for row in report["rows"]] == [FULL_CACHE, "sparse"]
    assert report["rows"][1]["kl_divergence"] == pytest.approx(0.02)
    assert len(report["rows"][1]["texts"]) == 2


def test_a_report_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ReportError, match="--out"):
        prepare_report(blocked / "quality.json", "--out")
    with pytest.raises(ReportError, match="--out"):
        write_report(tmp_path, rows(), {})
