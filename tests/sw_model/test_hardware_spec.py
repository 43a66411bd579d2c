# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path

import pytest

from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.hardware_spec import (
    HardwareSpecError,
    OnChipMemory,
    block_rams,
    check_hardware_spec,
)
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle
from hillinfer_model.presets import PRESETS, preset_spec

BASELINES = Path(__file__).parents[2] / "hw" / "rtl" / "baselines.json"
SOUND = KernelSpec(128, 40, 8, key_mode=KeyMode.FP16)


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("mode", list(KeyMode))
@pytest.mark.parametrize("rule", list(Rule))
def test_every_preset_can_be_built(preset, mode, rule):
    check_hardware_spec(preset_spec(preset, mode, rule))


def test_a_memory_takes_halves_of_block_rams():
    # 512 bits are 7 columns of 72 and half a one; 513 words are two rows of 512.
    assert OnChipMemory("keys", 1, 512, 512).block_rams == 7.5
    assert OnChipMemory("keys", 1, 512, 513).block_rams == 15
    assert OnChipMemory("keys", 3, 128, 64).block_rams == 6
    # Written by bytes there are 64 bits to a column.
    assert OnChipMemory("keys", 1, 512, 64, lane_bits=8).block_rams == 8
    assert OnChipMemory("keys", 1, 512, 64, lane_bits=128).block_rams == 7.5


def test_block_rams_are_those_that_synthesis_counts():
    baselines = json.loads(BASELINES.read_text())
    assert len(baselines) == 89
    for name, area in baselines.items():
        kernel, preset, mode, rule, *several = name.split()
        spec = preset_spec(preset, KeyMode(mode), Rule.RAW_SUM if rule == "-" else Rule(rule))
        if several:
            spec = replace(spec, queries=int(several[0]))
        assert block_rams(spec, kernel) == area["bram36"], name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 72}, "head_dim=72 is not supported.*to 80"),
        ({"head_dim": 48}, "head_dim=48 is not supported.*to 64"),
        ({"kv_heads": 41}, "kv_heads=41.*40"),
        ({"group_size": 9}, "group_size=9.*8"),
        ({"block_tokens": 1000}, "block_tokens=1000.*16"),
        ({"product_style": ProductStyle.MIXED}, "product_style=mixed"),
    ],
)
def test_a_spec_that_cannot_be_built_is_refused_with_the_reason(change, reason):
    check_hardware_spec(SOUND)
    with pytest.raises(HardwareSpecError, match=reason):
        check_hardware_spec(replace(SOUND, **change))


def test_too_much_on_chip_memory_is_refused_with_its_parts():
    needed = block_rams(SOUND)
    check_hardware_spec(SOUND, limit=needed)
    with pytest.raises(
        HardwareSpecError,
        match=rf"on-chip memory: score_tokens needs {needed:g} .*query codes.*984",
    ):
        check_hardware_spec(SOUND, limit=needed - 1)
