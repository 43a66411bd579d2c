# SPDX-License-Identifier: Apache-2.0
import pytest

from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle
from hillinfer_model.presets import PRESETS, Preset, preset_spec

# From the models' own configuration files: head_dim, KV heads, query heads, layers.
HEADS = {
    "smollm2-135m": (64, 3, 9, 30),
    "qwen2.5-0.5b": (64, 2, 14, 24),
    "opt-2.7b": (80, 32, 32, 32),
    "phi-3-mini": (96, 32, 32, 32),
    "llama-3.1-8b": (128, 8, 32, 32),
    "opt-6.7b": (128, 32, 32, 32),
    "llama-13b": (128, 40, 40, 40),
    "gemma-2b": (256, 1, 8, 18),
}


def test_presets_have_the_models_shapes():
    found = {
        name: (preset.head_dim, preset.kv_heads, preset.kv_heads * preset.group_size, preset.layers)
        for name, preset in PRESETS.items()
    }
    assert found == HEADS


@pytest.mark.parametrize("mode", list(KeyMode))
@pytest.mark.parametrize("rule", list(Rule))
def test_a_preset_becomes_a_spec(mode, rule):
    style = {"fp16": "dsp", "int8": "dsp", "int4": "lut", "int2": "lut"}[mode.value]
    expected = KernelSpec(128, 8, 4, key_mode=mode, rule=rule, product_style=ProductStyle(style))
    assert preset_spec("llama-3.1-8b", mode, rule) == expected
    assert preset_spec("opt-6.7b", mode, rule) != expected


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpt-2'.*llama-13b"):
        preset_spec("gpt-2", KeyMode.INT8, Rule.RAW_SUM)


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        PRESETS["mine"] = Preset(64, 1, 1, 1)
