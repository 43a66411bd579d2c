# SPDX-License-Identifier: Apache-2.0
"""`hillinfer generate` on the real model and real text."""

import pydoc_data.topics

import pytest
from command import read_report

pytestmark = pytest.mark.model


def test_answers_from_a_document(command, smollm2_folder, cold_dir, tmp_path):
    report = tmp_path / "run.json"
    outcome = command(
        *("generate", "--prompt", pydoc_data.topics.topics["assert"], "--cold-dir", cold_dir),
        *("--question", "Which statement inserts debugging assertions?", "--alpha", "1"),
        *("--max-new-tokens", 12, "--compare", "full", "--report", report),
    )
    assert outcome.code == 0, outcome.err
    assert "assert" in outcome.out
    written = read_report(report)
    assert written["model"]["name"] == "smollm2-135m"
    assert written["prompt_tokens"] > 250
    assert written["selected_share"] == 1.0
    # Rows are FP16 here and float32 in the ordinary cache; that does not decide about tokens.
    assert written["comparison"]["equal_answers"] == 1
