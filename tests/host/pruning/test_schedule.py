# SPDX-License-Identifier: Apache-2.0
"""Cuts: how they are written, what they keep, what they may save."""

import pytest

from hillinfer.errors import SettingsError
from hillinfer.pruning.schedule import PAPER, Cut, LayerWork, Schedule

# Weights of a layer, and query heads times head_dim.
SMOLLM2 = LayerWork(576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536, 576)
LLAMA_8B = LayerWork(4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336, 4096)
K = 1024
TEXTS = [
    "15:50%",
    "9:25%,19:12.5%,28:6.25%",
    "10:8192,20:4096",
    "15:mass=95%",
    "9:25%,19:mass=99.5%,28:64",
    # Of what is left there, which may be less.
    "9:mass=90%,15:mass=95%",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_schedule_is_written_as_it_is_read(text):
    assert str(Schedule.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no cut"),
        ("fifteen", "'fifteen' is no cut; write LAYER:SHARE%, LAYER:TOKENS or LAYER:mass=SHARE%"),
        ("15:mass=95", "'15:mass=95' is no cut"),
        ("15:mass=0%", "15:mass=0%: keep more than 0 %"),
        ("15:mass=101%", "at most 100 %"),
        ("15:50", "keep 64 tokens at least"),
        ("15:0%", "keep more than 0 %"),
        ("15:101%", "at most 100 %"),
        ("0:50%", "no layer before it"),
        ("9:50%,9:25%", "layers of cuts must rise"),
        ("9:50%,8:25%", "layers of cuts must rise"),
        ("9:25%,19:50%", "19:50% keeps more than 9:25%"),
        ("9:1024,19:2048", "19:2048 keeps more than 9:1024"),
    ],
)
def test_what_is_no_schedule_is_refused_with_what_would_be_one(text, said):
    with pytest.raises(SettingsError, match=said.replace("(", r"\(")):
        Schedule.parse(text)


def test_cuts_behind_the_last_layer_are_refused():
    Schedule.parse("29:50%").check_layers(30)
    with pytest.raises(SettingsError, match="layers 0 to 29"):
        Schedule.parse("30:50%").check_layers(30)


@pytest.mark.parametrize(
    ("text", "tokens", "kept"),
    [
        # Of 8 blocks: of 500 tokens the last one is not full.
        ("1:50%", 512, [4]),
        ("1:50%", 500, [4]),
        ("1:50%,2:1%", 512, [4, 1]),
        ("1:128,2:64", 512, [2, 1]),
        ("1:100000", 512, [8]),
        ("1:256,2:100%", 512, [4, 4]),
        ("1:100%", 512, [8]),
        ("1:mass=100%", 512, [8]),
        ("1:50%,2:mass=100%", 512, [4, 4]),
    ],
)
def test_kept_blocks(text, tokens, kept):
    schedule = Schedule.parse(text)
    assert schedule.kept_blocks(tokens) == kept
    assert schedule.prunes(tokens) == (kept[-1] < 8)


@pytest.mark.parametrize(
    ("text", "most", "tokens_of_layers"),
    [
        ("1:mass=95%", [8], [512] * 4),
        ("1:50%,2:mass=90%", [4, 4], [512, 256, 256, 256]),
        ("1:mass=90%,2:25%", [8, 2], [512, 512, 128, 128]),
    ],
)
def test_of_a_cut_by_mass_the_most_it_keeps_is_known_before(text, most, tokens_of_layers):
    schedule = Schedule.parse(text)
    assert schedule.kept_blocks(512) == most
    assert schedule.band_tokens(512, 4) == tokens_of_layers
    assert schedule.prunes(512)
    dense, known = SMOLLM2.flops([512] * 4), SMOLLM2.flops(tokens_of_layers)
    assert SMOLLM2.limit(schedule, 512, 4) == dense / known


def test_two_blocks_cannot_lose_any_by_mass():
    schedule = Schedule.parse("1:mass=1%")
    assert [schedule.prunes(tokens) for tokens in (1, 64, 128, 129)] == [False, False, False, True]


def test_the_papers_budgets_do_nothing_up_to_their_size():
    schedule = Schedule.parse("llama-3.1-8b")
    assert str(schedule) == PAPER["llama-3.1-8b"]
    assert schedule.band_tokens(8 * K, 32) == [8 * K] * 20 + [4 * K] * 10 + [2 * K] * 2
    assert not schedule.prunes(2 * K)


@pytest.mark.parametrize(
    ("tokens", "gibibytes"),
    [(8, 0.80), (16, 1.11), (24, 1.42), (28, 1.58), (32, 1.73)],
)
def test_kv_of_the_papers_table_2(tokens, gibibytes):
    """Rows of 4 KiB: keys and values of 8 heads of 128 numbers of 16 bits."""
    rows = sum(Schedule.parse("llama-3.1-8b").band_tokens(tokens * K, 32))
    assert rows * 4 * K / K**3 == pytest.approx(gibibytes, abs=0.006)


@pytest.mark.parametrize(
    ("work", "layers", "text", "tokens", "limit"),
    [
        (SMOLLM2, 30, "9:25%,19:12.5%,28:6.25%", 4096, 2.60),
        (SMOLLM2, 30, "9:25%,19:12.5%,28:6.25%", 7800, 2.71),
        (SMOLLM2, 30, "15:50%", 4096, 1.43),
        (SMOLLM2, 30, "15:50%", 7800, 1.47),
        # The paper measured 2.53.
        (LLAMA_8B, 32, "llama-3.1-8b", 32 * K, 2.52),
    ],
)
def test_limits_of_speed(work, layers, text, tokens, limit):
    assert work.limit(Schedule.parse(text), tokens, layers) == pytest.approx(limit, abs=0.015)


def test_what_enters_costs_as_much_as_it_is():
    """All of a band is a whole read of it; half of it half of that."""
    whole = SMOLLM2.flops([3480])
    assert SMOLLM2.entering(3480, 3480) == pytest.approx(whole)
    assert SMOLLM2.entering(1740, 3480) == pytest.approx(whole / 2)
    assert SMOLLM2.entering(1740, 1740) == pytest.approx(SMOLLM2.flops([1740]))


def test_a_cut_keeps_a_share_or_tokens_or_mass():
    assert Cut(3, share=0.5).blocks_of(9) == 4
    assert Cut(3, tokens=200).blocks_of(9) == 3
    for wrong in ({}, {"share": 0.5, "mass": 0.5}, {"tokens": 64, "mass": 1.0}):
        with pytest.raises(SettingsError, match="give one of the three"):
            Cut(3, **wrong)
