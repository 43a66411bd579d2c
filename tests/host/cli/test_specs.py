# SPDX-License-Identifier: Apache-2.0
"""`hillinfer specs`, against numbers worked out by hand."""

import json
import subprocess
import sys

import pytest

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_figures import P2P_ROOF, kernel_figures
from hillinfer_model.presets import PRESETS, preset_spec

_found = {}


def rows_of(command, *arguments):
    # What is modelled depends on nothing else, and cycles of many tokens take seconds.
    if arguments not in _found:
        outcome = command("specs", *arguments, "--json")
        assert outcome.code == 0, outcome
        report = json.loads(outcome.out)
        assert report["label"] == "modelled"
        _found[arguments] = {row["mode"]: row for row in report["rows"]}
    return _found[arguments]


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
    by_head = ("llama-3.1-8b", "--scope", "kv_head", "--key-mode", "int4")
    found = rows_of(command, *by_head)["int4"]["card_tokens"]
    assert found == expected
    # FP16 keys: 2,048 bytes, and 64 beats of statistics per segment and layer.
    per_segment = 32 * (2048 * 1024 + 64 * 64) + 2 * (67 + 1 + 1 + 64) * 64
    expected = (4_000_000_000 - 67_108_864) // per_segment * 1024
    assert rows_of(command, "llama-3.1-8b")["fp16"]["card_tokens"] == expected


def test_rows_on_a_card_take_their_values_too(command):
    # FP16 rows: 4,096 bytes a token, and 64 beats of statistics per segment and layer.
    per_segment = 32 * (4096 * 1024 + 64 * 64) + 2 * (67 + 1 + 1 + 64) * 64
    expected = (4_000_000_000 - 67_108_864) // per_segment * 1024
    rows = rows_of(command, "llama-3.1-8b")
    assert rows["fp16"]["card_row_tokens"] == expected
    assert rows["int8"]["card_row_tokens"] == 0


def test_what_several_queries_a_pass_gain_is_told(command):
    rows = rows_of(command, "llama-3.1-8b")
    assert [row["passes"]["queries"] for row in rows.values()] == [2, 4, 4, 4]
    chosen = ("llama-3.1-8b", "--tokens", "16384", "--key-mode", "int4")
    found = rows_of(command, *chosen)["int4"]["passes"]
    # The RTL's is 3.82 (docs/results/kernels.md).
    assert found["gain"] == pytest.approx(3.82, abs=0.05)
    assert found["gain"] == pytest.approx(4 * found["cycles_of_one"] / found["cycles"])
    by_head = rows_of(command, *chosen, "--scope", "kv_head")
    assert by_head["int4"]["passes"]["gain"] < found["gain"]
    outcome = command("specs", *chosen)
    assert "token scores a cycle, over one query's" in outcome.out
    assert f"{found['gain']:.2f}" in outcome.out


FREE = ("--launch-us", "0", "--copy-us", "0", "--poll-us", "0", "--copy-rate", "1e9")


def test_a_launch_costs_what_its_parts_do(command):
    chosen = ("llama-3.1-8b", "--key-mode", "int4", "--tokens", "4096")
    card = rows_of(command, *chosen)["int4"]["card"]
    # 4,096 scores of 4 bytes; 4 query blocks of 67 beats with a descriptor each.
    assert card["score_bytes"] == 4 * 4096
    assert card["key_bytes"] == 520 * 4096
    copied = (4 * 4096 + 4 * 68 * 64) / 3.2e9
    beside = 30e-6 + 2 * 10e-6 + copied + 10e-6
    assert card["launch_seconds"] == pytest.approx(card["kernel_seconds"] + beside)
    # 23.2 GB/s of one thread, as measured.
    assert card["host_seconds"] == pytest.approx(520 * 4096 / 23.2e9)
    assert card["host_threads"] == pytest.approx(card["host_seconds"] / card["launch_seconds"])
    free = rows_of(command, *chosen, *FREE)["int4"]["card"]
    assert free["launch_seconds"] == pytest.approx(card["kernel_seconds"], rel=1e-6)
    halved = rows_of(command, *chosen, "--host-rate", "11.6")["int4"]["card"]
    assert halved["host_threads"] == pytest.approx(2 * card["host_threads"])
    # FP16 keys are scored by no host.
    assert rows_of(command, "llama-3.1-8b")["fp16"]["card"]["host_seconds"] == 0


def test_loads_beside_scoring_hide_the_shorter_of_the_two(command):
    """16 segments, eight a launch: only the first load and the last scores are alone."""
    for mode in ("fp16", "int4"):
        chosen = ("llama-3.1-8b", "--key-mode", mode, "--tokens", "16384")
        card = rows_of(command, *chosen)[mode]["card"]
        loads, scores = card["key_bytes"] / P2P_ROOF * 300e6, card["kernel_seconds"] * 300e6
        assert card["in_turn_cycles"] == pytest.approx(loads + scores, abs=1)
        hidden = min(loads, scores) / 2
        assert card["beside_cycles"] == pytest.approx(loads + scores - hidden, abs=1)


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "gemma-2b"])
def test_a_kernel_takes_what_the_bytes_leave_of_the_bus(command, preset):
    """In scope kv_head every head's scores are written: they take 5 % of Llama's bus."""
    for scope in Scope:
        arguments = (preset, "--scope", scope, "--tokens", "32768", "--key-mode", "int4")
        card = rows_of(command, *arguments)["int4"]["card"]
        assert 0.96 * card["bus_limit"] < card["beats_per_cycle"] < card["bus_limit"]
    heads = PRESETS[preset].kv_heads
    assert card["score_bytes"] == 4 * 32768 * heads
    others = 4 * heads / (card["key_bytes"] / 32768)
    assert card["bus_limit"] == pytest.approx((1 - 105 / 2340) / (1 + others), rel=0.02)


def test_raw_sum_multiplies_one_query_per_kv_head(command):
    row = rows_of(command, "llama-3.1-8b", "--rule", "raw_sum", "--key-mode", "int8")["int8"]
    assert row["heads_per_code"] == 1
    assert row["launch"]["cycles"] < rows_of(command, "llama-3.1-8b")["int8"]["launch"]["cycles"]


def test_the_table_says_what_it_is_and_shows_the_rates(command):
    outcome = command("specs", "llama-3.1-8b", "--key-mode", "fp16", "--tokens", "8192")
    assert outcome.code == 0
    assert "modelled, not measured" in outcome.out
    assert "Where a card pays" in outcome.out
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
        (("gemma-2b", "--poll-us", "-1"), "times must be 0 or more"),
        (("gemma-2b", "--copy-rate", "0"), "the rate above 0"),
        (("gemma-2b", "--launch-us", "nan"), "times must be 0 or more"),
        (("gemma-2b", "--copy-rate", "inf"), "all finite"),
        (("gemma-2b", "--host-rate", "0"), "--host-rate 0 must be above 0"),
        (("gemma-2b", "--host-rate", "nan"), "--host-rate nan must be above 0 and finite"),
        (("gemma-2b", "--exact", "2"), "exact=2.0 must be a share from 0 to 1"),
        (("gemma-2b", "--exact-floor", "-1"), "exact_floor=-1 must be 0 or more"),
        (("gemma-2b", "--dram-budget", "much"), "'much' is not a size"),
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


CODED = ("--tokens", "8192", "--alpha", "0.2", "--exact", "0.02")


def test_bytes_of_a_step_with_coded_tokens(command):
    rows = rows_of(command, "llama-3.1-8b", *CODED, "--dram-budget", "27%")
    step = rows["int4"]["step"]
    # 0.2 · 8192 = 1638.4 selected, 0.02 · 8192 = 163.84 exact.
    assert (step["exact_tokens"], step["coded_tokens"]) == (164, 1474)
    # Rows of 2 · 8 · 128 channels of 2 bytes; codes of 8 · 128 / 2 bytes and 8 exponents.
    assert step["exact_row_bytes"] == 32 * 164 * 4096
    assert step["value_code_bytes"] == 32 * 1474 * 520
    assert step["key_shadow_bytes"] == step["all_code_bytes"] == 32 * 8192 * 520
    assert step["kv_bytes"] == 32 * 8192 * 4096
    # 2 · 520 of 4096 bytes are 25.4 %.
    assert step["budget_bytes"] == int(0.27 * step["kv_bytes"])
    assert step["all_codes_fit"] is True
    int4 = (*CODED, "--key-mode", "int4")
    less = rows_of(command, "llama-3.1-8b", *int4, "--dram-budget", "25%")
    assert less["int4"]["step"]["all_codes_fit"] is False
    # A shadow of eight bits is larger.
    assert rows["int8"]["step"]["all_codes_fit"] is False
    # Nothing is coded there.
    for mode in ("fp16", "int2"):
        other = rows[mode]["step"]
        assert (other["exact_tokens"], other["coded_tokens"]) == (1638, 0)
        assert (other["all_code_bytes"], other["all_codes_fit"]) == (0, None)


def test_sets_of_their_own_may_share_no_token(command):
    step = rows_of(command, "llama-3.1-8b", *CODED, "--scope", "kv_head", "--key-mode", "int4")
    step = step["int4"]["step"]
    assert step["exact_row_bytes"] == 32 * 8 * 164 * 4096
    # 8 · 1474 are more tokens than there are.
    assert step["value_code_bytes"] == 32 * 8192 * 520


def test_tokens_are_coded_by_default_and_all_are_exact_where_asked_for(command):
    plain = ("llama-3.1-8b", "--tokens", "1024")
    assert rows_of(command, *plain) == rows_of(command, *plain, *CODED[2:])
    plain = (*plain[:2], "8192", "--key-mode", "int4")
    step = rows_of(command, *plain, "--exact", "1")["int4"]["step"]
    assert (step["exact_tokens"], step["coded_tokens"]) == (819, 0)
    assert step["exact_row_bytes"] == 32 * 819 * 4096
    assert (step["all_code_bytes"], step["budget_bytes"]) == (0, None)


def test_the_table_says_what_a_step_needs(command):
    mode = ("--key-mode", "int4")
    outcome = command("specs", "llama-3.1-8b", *mode, *CODED, "--dram-budget", "27%")
    lines = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in outcome.out.splitlines())
        if len(cells) == 4
    }
    assert lines["rows of exact tokens"] == "20.5 MiB"
    assert lines["codes of values"] == "23.4 MiB"
    assert lines["codes of all values in DRAM"] == "130.0 MiB"
    assert lines["with all ranked keys, of the KV"] == "25.4%"
    assert lines["fit 27%"] == "yes"
    assert "come on top" in outcome.out
    without = command("specs", "llama-3.1-8b", *mode, "--exact", "1", "--dram-budget", "27%")
    assert "come on top" not in without.out
