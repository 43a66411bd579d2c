# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

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

SOUND = KernelSpec(128, 40, 8, key_mode=KeyMode.FP16)


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("mode", list(KeyMode))
@pytest.mark.parametrize("rule", list(Rule))
def test_every_preset_can_be_built(preset, mode, rule):
    check_hardware_spec(preset_spec(preset, mode, rule))


def test_a_memory_takes_whole_block_rams():
    # 512 bits are 8 columns of 72; 513 words are two rows of 512.
    assert OnChipMemory("keys", 1, 512, 512).block_rams == 8
    assert OnChipMemory("keys", 1, 512, 513).block_rams == 16
    assert OnChipMemory("keys", 3, 128, 65).block_rams == 6
    assert OnChipMemory("keys", 3, 128, 64).block_rams == 0


def test_block_rams_of_a_kernel_counted_by_hand():
    # LLaMA-13B, FP16: key FIFO 8, write FIFO 8; query codes of 2 halves x 320 words of 128 bits:
    # 2 x 2; addends 80 words of 40 bits: 1; statistics 2 x 320 words of 512 bits: 16.
    assert block_rams(preset_spec("llama-13b", KeyMode.FP16, Rule.RAW_SUM)) == 8 + 8 + 4 + 1 + 16


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
        HardwareSpecError, match=rf"on-chip memory: {needed} block RAMs .*query codes.*984"
    ):
        check_hardware_spec(SOUND, limit=needed - 1)
