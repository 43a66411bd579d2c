# SPDX-License-Identifier: Apache-2.0
"""Settings are looked at in time that grows with their size; those of real models pass."""

import time

from hillinfer.models.config_check import check_settings

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
