# SPDX-License-Identifier: Apache-2.0
"""Area of a kernel that attends to coded tokens: what is added up, and what is stored."""

import json
import subprocess
import sys

import pytest

import partial_softmax
from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.synth import Area
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.presets import preset_spec

LLAMA = preset_spec("llama-3.1-8b", KeyMode.INT4, Rule.WEIGHT_SUM)
PARTS = {
    "coded_weight": Area(10, 1, 0, 0, 0),
    "block_output": Area(100, 10, 2, 0, 0),
    "moved_sum": Area(1000, 100, 0, 0, 0),
    "value_sums dsp": Area(5, 6, 256, 0, 0),
    "value_sums lut": Area(50_000, 6, 0, 0, 0),
    "score_core": Area(700, 70, 7, 15.5, 0),
}
KERNEL = Area(900, 90, 7, 38, 0)


def test_parts_are_added_to_what_lies_around_the_core():
    found = partial_softmax.kernel_area(LLAMA, PARTS, KERNEL, "dsp")
    # Twice a weight for each of 4 heads, 8 lanes of outputs and of merging.
    lut = 900 - 700 + 8 * 10 + 8 * 100 + 8 * 1000 + 5
    # Two blocks of 64 code rows of 512 bytes are 1,024 beats: two times seven and a half; two times
    # 128 beats of L' in one column of them; 512 words of 256 bits are four.
    blocks = 38 - 15.5 + 2 * 7.5 + 7.5 + 4
    assert found == Area(lut, 90 - 70 + 8 + 80 + 800 + 6, 8 * 2 + 256, blocks, 0)
    other = partial_softmax.kernel_area(LLAMA, PARTS, KERNEL, "lut")
    assert (other.lut, other.dsp) == (lut - 5 + 50_000, 16)


def test_stored_counts_are_of_every_part():
    stored = json.loads(partial_softmax.STORED.read_text())
    assert stored.keys() == PARTS.keys()
    # Two codes share a multiplier: 4 heads of 128 channels.
    assert stored["value_sums dsp"]["dsp"] == 4 * 128 // 2
    assert stored["value_sums lut"]["dsp"] == 0


@pytest.mark.parametrize("tokens", ["4096"])
def test_the_command_says_what_its_figures_are(tmp_path, tokens):
    out = tmp_path / "report.json"
    command = [sys.executable, ROOT / "tools" / "partial_softmax.py", "--tokens", tokens]
    command += ["--host-scoring", "20", "--host-coded", "2", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "modelled" in done.stdout
    assert "yosys estimate" in done.stdout
    report = json.loads(out.read_text())
    assert report["label"] == "modelled"
    # Five ways on one bank; all but the host's on two.
    assert len(report["rows"]) == 9
