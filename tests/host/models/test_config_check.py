# SPDX-License-Identifier: Apache-2.0
"""Settings are looked at in time that grows with their size; those of real models pass."""

import time

import pytest

from hillinfer.models.json_files import check_settings

# As their config.json says, LongRoPE's lists cut short.
ROTARY = {
    "Llama-3.1-8B": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "Llama-3.2-1B": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "Llama-4-Scout": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "Qwen2.5-7B-Instruct, long": {
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "type": "yarn",
    },
    "Phi-3.5-mini": {
        "long_factor": [1.0800000429153442, 1.1100000143051147, 64.98999786376953],
        "short_factor": [1.0, 1.0199999809265137, 2.1299991607666016],
        "type": "longrope",
    },
    "MiniCPM4-8B": {
        "rope_type": "longrope",
        "long_factor": [0.9977997200264581, 1.014658295992452],
        "short_factor": [0.9977997200264581, 1.014658295992452],
        "original_max_position_embeddings": 32768,
    },
    "DeepSeek-V2-Lite": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "gpt-oss-20b": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "Qwen2-VL": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "deepseek-coder-6.7b": {"type": "linear", "factor": 4.0},
    "internlm2": {"type": "dynamic", "factor": 2.0},
    "layers apart": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "none": None,
    },
    "nothing": {"factor": None, "attention_factor": None, "beta_fast": None, "rope_type": "yarn"},
}
# Of a busy machine; it takes a second by itself.
SECONDS = 10


def test_much_deep_inside_is_looked_at_once():
    settings = ["text"] * 400_000
    for _ in range(900):
        settings = [settings]
    started = time.monotonic()
    check_settings({"model_type": "llama", "note": settings}, "it")
    assert time.monotonic() - started < SECONDS


def test_settings_of_labels_and_layers_pass():
    settings = {"num_labels": 2, "num_nextn_predict_layers": 0, "first_k_dense_replace": 3}
    check_settings(settings | {"attention_types": [[["global", "local"], 12]]}, "it")


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("model", [*ROTARY, None])
def test_rotary_parameters_of_models_pass(model, name):
    check_settings({name: ROTARY.get(model)}, "it")
    check_settings({"text_config": {name: ROTARY.get(model)}}, "it")
