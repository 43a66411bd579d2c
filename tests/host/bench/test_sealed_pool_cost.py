# SPDX-License-Identifier: Apache-2.0
"""A sealed cold pool is measured beside a plain one, in pairs, and its answers are the same."""

import pytest
from tiny_models import TinyModel, prompts

from hillinfer.secrecy.library import SecrecyError
from hillinfer.secrecy.pages import CipherRate
from hillinfer.settings import Settings
from hillinfer_bench.storing.sealed_pool import SealedPoolRow, Spent, measure_sealed_pool

RATE = CipherRate(2e9, 4e9, "a library")


def test_both_pools_answer_alike(tmp_path):
    model = TinyModel(head_dim=32).build()
    ids, _ = prompts([700])
    said = []
    # A small budget: rows come from the drive.
    settings = Settings(dram_budget="15%", kept_recent=4, alpha=0.3)
    try:
        row = measure_sealed_pool(tmp_path, model, ids[0].tolist(), 6, 2, said.append, settings)
    except SecrecyError as error:
        pytest.skip(str(error))
    assert row.agrees
    assert len(said) == 3
    for part in ("prefill", "decode"):
        for clock in ("wall", "processor"):
            assert len(row.ratios(part, clock)) == 2
            assert min(row.ratios(part, clock)) > 0
    assert "answers agree" in row.text()
    assert not list(tmp_path.iterdir())


def test_pairs_are_compared_and_not_their_sums():
    spent = {
        "no": Spent(wall=[1.0, 10.0, 2.0], processor=[1.0, 1.0, 1.0]),
        "yes": Spent(wall=[1.1, 10.5, 2.4], processor=[1.5, 1.25, 1.0]),
    }
    row = SealedPoolRow(spent, spent, agrees=False, cipher=RATE)
    assert row.ratios("decode", "wall") == pytest.approx([1.1, 1.05, 1.2])
    lines = row.text().splitlines()
    assert "2.00 GB/s sealing, 4.00 opening; answers DIFFER" in lines[0]
    assert lines[1].startswith(
        "prefill, processor seconds: plain 1.000, sealed over plain 1.250 (quarters"
    )
    assert "sealed over plain 1.100" in lines[2]
