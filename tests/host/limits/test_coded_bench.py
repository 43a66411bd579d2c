# SPDX-License-Identifier: Apache-2.0
"""What `tools/coded_bench.py` computes beside its rates, and that it measures a small shadow."""

import pytest

from coded_bench import bench, products_allow
from hillinfer.native.library import Variant, native_library


def test_products_bound_attention_by_query_heads_and_threads():
    # Sixteen products for 64 bytes and four query heads, on each of two threads.
    assert products_allow("llama-3.1-8b", 3.65e9, 1) == pytest.approx(3.65e9 * 64 / 16)
    assert products_allow("llama-3.1-8b", 3.65e9, 2) == pytest.approx(3.65e9 * 64 / 8)
    # Two threads share three KV heads as two and one.
    one, two = (products_allow("smollm2-135m", 3.65e9, threads) for threads in (1, 2))
    assert two == pytest.approx(1.5 * one)


def test_a_shadow_in_a_cache_is_measured_beside_its_limit(capsys):
    variant = next(one for one in native_library().variants if one is not Variant.NEON)
    made = bench("smollm2-135m", 1, 1, (variant,), 1e3)
    said = capsys.readouterr().out.splitlines()
    assert [line.strip().split("  ")[0] for line in said] == [
        "smollm2-135m 1 in 1",
        "smollm2-135m 1 in 5",
    ]
    rate = made["one_in_1"]["bytes_per_second"][variant.value]
    assert 0 < rate["median"] <= rate["fastest"]
    # So few products allow nothing of what memory gives; without such a bound reading is it.
    assert "limit 0.00" in said[0]
    bench("smollm2-135m", 1, 1, (variant,), float("inf"))
    assert "limit 1.00" in capsys.readouterr().out
