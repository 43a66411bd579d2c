# SPDX-License-Identifier: Apache-2.0
"""What first steps read is counted behind the same prompt from each source, with the same bits."""

from dataclasses import replace

import pytest
import torch
from tiny_models import TinyModel, prompts

from hillinfer.errors import SettingsError
from hillinfer.settings import Settings
from hillinfer_bench.storing.first_steps import (
    FirstSteps,
    FirstStepsRequest,
    Source,
    Ten,
    measure_first_steps,
    text_of,
)

TEN = Ten(read_bytes=2.6e6, without_codes=1500.0, as_rows=120.0)


def test_each_source_brings_the_same_bits(tmp_path):
    ids, _ = prompts([1044])
    settings = Settings(dram_budget="8MiB", alpha=0.5, exact=0.02, exact_floor=10)
    said = []
    with torch.no_grad():
        rows = measure_first_steps(
            tmp_path, TinyModel().build(), ids[0].tolist(), 20, settings, said.append
        )
    assert {row.source for row in rows} == set(Source)
    assert [len(row.tens) for row in rows] == [2, 2, 2]
    assert len(said) == 3
    assert text_of(rows).splitlines()[-1].endswith("logits are the same bits")
    # The twin: rows that differ are said so.
    other = [replace(rows[0], logits="other"), *rows[1:]]
    assert text_of(other).splitlines()[-1].endswith("logits DIFFER")


def test_a_row_tells_its_first_and_last_tens():
    tens = [TEN, replace(TEN, read_bytes=1e6), TEN, replace(TEN, read_bytes=5e5)]
    row = FirstSteps(Source.STORE, "25%", 0.0, 0.0, tens, "bits")
    assert row.text() == (
        "25%, from a store: 1 to 10: 2.6 MB, 120 of 1,500 cold codes as rows; 11 to 20: 1.0 MB, "
        "120 of 1,500 cold codes as rows; last ten: 0.5 MB, 120 of 1,500 cold codes as rows"
    )


@pytest.mark.parametrize(("tokens", "steps"), [(1000, 20), (0, 20), (1024, 15), (1024, 0)])
def test_numbers_that_mean_nothing_are_refused(tokens, steps, tmp_path):
    with pytest.raises(SettingsError, match="must be a multiple of"):
        FirstStepsRequest("model", tmp_path, tmp_path / "out", tokens, steps, ("25%",))
