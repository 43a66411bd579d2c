# SPDX-License-Identifier: Apache-2.0
"""What `tools/coded_bench.py` computes beside its rates, and that it measures a small shadow."""

import pytest

from coded_bench import bench, clock, products_rate
from hillinfer.native.library import Variant, native_library


def test_products_bound_attention_by_clock_and_query_heads():
    # Eight cycles for 64 bytes and four query heads, which is the figure of the documents.
    assert products_rate(4, 4.2e9) == pytest.approx(4.2e9 * 64 / 8)
    assert products_rate(3, 4.2e9) > products_rate(4, 4.2e9)


def test_the_clock_is_the_fastest_that_the_system_says():
    said = "processor\t: 0\ncpu MHz\t\t: 2600.5\n\nprocessor\t: 1\ncpu MHz\t\t: 1400.000\n"
    assert clock(said) == 2600.5e6
    assert clock("processor\t: 0\n") == 0


def test_a_shadow_in_a_cache_is_measured(capsys):
    variant = next(one for one in native_library().variants if one is not Variant.NEON)
    made = bench("smollm2-135m", 1, 1, (variant,), 1e9)
    said = capsys.readouterr().out.splitlines()
    assert [line.strip().split("  ")[0] for line in said] == [
        "smollm2-135m 1 in 1",
        "smollm2-135m 1 in 5",
    ]
    rate = made["one_in_1"]["bytes_per_second"][variant.value]
    assert 0 < rate["median"] <= rate["fastest"]
    has_products = variant is Variant.AVX512_VNNI
    assert ("products 10.7" in said[0], made["products"] > 0) == (has_products, has_products)
