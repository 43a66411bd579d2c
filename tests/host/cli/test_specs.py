# SPDX-License-Identifier: Apache-2.0
"""`hillinfer specs`, against numbers worked out by hand."""

import json
import subprocess
import sys

import pytest

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_figures import kernel_figures
from hillinfer_model.presets import preset_spec


def rows_of(command, *arguments):
    outcome = command("specs", *arguments, "--json")
    assert outcome.code == 0, outcome
    report = json.loads(outcome.out)
    assert report["label"] == "modelled"
    return {row["mode"]: row for row in report["rows"]}


def test_beats_and_bytes_of_llama(command):
    rows = rows_of(command, "llama-3.1-8b")
    assert list(rows) == ["fp16", "int8", "int4", "int2"]
    # 8 KV heads of 128: 8 slices a head; a tile of 4, 8, 16 tokens shares a beat per slice.
    assert [row["code_beats_per_token"] for row in rows.values()] == [32, 16, 8, 4]
    assert [row["exponent_beats_per_token"] for row in rows.values()] == [0, 1 / 8, 1 / 8, 1 / 8]
    assert [row["key_codes_per_beat"] for row in rows.values()] == [32, 64, 128, 256]
    assert {row["heads_per_code"] for row in rows.values()} == {4}
    # kv (1 + d b / 8), and 2 kv d for FP16 keys.
    assert [row["shadow_bytes_per_token"] for row in rows.values()] == [2048, 1032, 520, 264]
    assert rows["fp16"]["p2p_bytes_per_token"] == [2048, 4096]
    assert rows["int4"]["p2p_bytes_per_token"] == [520, 0]
    assert rows["int4"]["launch"]["beats"] == 4096 * 520 // 64
    assert rows["int4"]["launch"]["code_beats"] == 4096 * 8
    assert rows["int4"]["rows"] is None
    assert rows["fp16"]["rows"]["beats"] == 4096 * 32


def test_tokens_on_a_card(command):
    # 4e9 bytes less 64 MiB. Per segment of 1,024 tokens: 32 layers of 520 · 1024 bytes, and twice
    # a query block of 67 beats, a descriptor, a status beat and 64 beats of scores.
    per_segment = 32 * 520 * 1024 + 2 * (67 + 1 + 1 + 64) * 64
    expected = (4_000_000_000 - 67_108_864) // per_segment * 1024
    assert expected == 235_520
    assert rows_of(command, "llama-3.1-8b")["int4"]["card_tokens"] == expected
    # With an array per KV head, 8 · 64 beats of scores.
    per_segment = 32 * 520 * 1024 + 2 * (67 + 1 + 1 + 512) * 64
    expected = (4_000_000_000 - 67_108_864) // per_segment * 1024
    found = rows_of(command, "llama-3.1-8b", "--scope", "kv_head")["int4"]["card_tokens"]
    assert found == expected
    # FP16 keys: 2,048 bytes, and 64 beats of statistics per segment and layer.
    per_segment = 32 * (2048 * 1024 + 64 * 64) + 2 * (67 + 1 + 1 + 64) * 64
    expected = (4_000_000_000 - 67_108_864) // per_segment * 1024
    assert rows_of(command, "llama-3.1-8b")["fp16"]["card_tokens"] == expected


def test_raw_sum_multiplies_one_query_per_kv_head(command):
    row = rows_of(command, "llama-3.1-8b", "--rule", "raw_sum", "--key-mode", "int8")["int8"]
    assert row["heads_per_code"] == 1
    assert row["launch"]["cycles"] < rows_of(command, "llama-3.1-8b")["int8"]["launch"]["cycles"]


def test_the_table_says_what_it_is_and_shows_the_rates(command):
    outcome = command("specs", "llama-3.1-8b", "--key-mode", "fp16", "--tokens", "8192")
    assert outcome.code == 0
    assert "modelled, not measured" in outcome.out
    lines = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in outcome.out.splitlines())
        if len(cells) == 4
    }
    figures = kernel_figures(
        preset_spec("llama-3.1-8b", KeyMode.FP16, Rule.WEIGHT_SUM), Scope.LAYER, 32, 8192
    )
    cycles = figures.launch.cycles
    assert lines["cycles per launch of 8,192 tokens"] == f"{cycles:,}"
    assert cycles > 8192 * 32
    # 64 bytes a beat, 300 M cycles a second.
    rate = 8192 * 32 * 64 / (cycles / 300e6)
    assert lines["key bytes read, GB/s"] == f"{rate / 1e9:.2f}"
    assert lines["share of the DDR roof"] == f"{rate / 19.2e9:.1%}"
    assert lines["share of the P2P roof"] == f"{rate / 3.2e9:.0%}"
    # 3.2 GB/s through 2,048 bytes a token, or 4,096 with its values.
    assert lines["tokens/s of a layer, by P2P"] == "0.78 M"
    assert outcome.out.count("1.56 M") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("gpt-2",), "no preset is named 'gpt-2'; there are smollm2-135m"),
        (("gemma-2b", "--tokens", "0"), "--tokens 0 is outside"),
        (("gemma-2b", "--key-mode", "int3"), "int3"),
    ],
)
def test_bad_arguments_are_one_line(command, arguments, text):
    assert text in command("specs", *arguments).error_line()


def test_specs_needs_no_torch():
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from hillinfer.cli.main import main\n"
        "main(['specs', 'gemma-2b', '--tokens', '100'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "gemma-2b: head_dim 256" in done.stdout
