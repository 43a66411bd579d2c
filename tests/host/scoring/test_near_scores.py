# SPDX-License-Identifier: Apache-2.0
"""The short way to L' is the long one's number wherever it says that it fits."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from native_variants import every_variant, native_scorer
from scorer_cases import assert_same_tuples, segments_of

from hillinfer.devices.opening import GoldenScorer
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec

NATIVE = Path(__file__).parents[3] / "host" / "native"
# Head 0 of raw sums carries what all others add: with 64 KV heads twice of it exceeds 32 bits.
PROGRAM = """
#include <cstdio>
#include <cstdint>
#include <initializer_list>
#include "near_scores.h"

int main() {
    const hillinfer::Shape shape{64, 1, 64, 64, 8, 1, 0, 1024};
    const int nu = largest_nu(shape);
    const int64_t offsets[] = {0, 8388607, -8388607, (int64_t(1) << 29) - 1, -(int64_t(1) << 29),
                               int64_t(1) << 30, -(int64_t(1) << 30), 1082130303, -1082130303};
    for (const int64_t offset : offsets) {
        const NearRow row(Correction{0, 0}, -7, nu, int32_t(offset));
        for (const int product : {-100000, -100, 0, 100, 99999}) {
            for (int exponent = 0; exponent < 5; ++exponent) {
                if (!row.fits(exponent)) continue;
                // P times 2^(exponent + query exponent - 6), to the nearest, halves up.
                const int right = 13 - exponent;
                const int64_t half = int64_t(1) << (right - 1);
                const int64_t exact = ((product + half) >> right) + offset;
                const int64_t found = row.log_weight(product, exponent);
                std::printf("%lld %d %d %lld %lld\\n", (long long)offset, product, exponent,
                            (long long)found, (long long)exact);
            }
        }
    }
}
"""


def test_an_offset_of_which_twice_does_not_fit_goes_the_long_way(tmp_path):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++")
    source, program = tmp_path / "near.cpp", tmp_path / "near"
    source.write_text(PROGRAM)
    subprocess.run(
        [compiler, "-std=c++17", "-fwrapv", f"-I{NATIVE}", str(source), "-o", str(program)],
        check=True,
    )
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    rows = [tuple(map(int, line.split())) for line in output.splitlines()]
    offsets = {offset for offset, *_ in rows}
    assert {0, 8388607, -8388607} <= offsets
    assert max(map(abs, offsets)) < 1 << 29 or max(offsets) == (1 << 29) - 1
    for offset, product, exponent, found, exact in rows:
        assert found == exact, (offset, product, exponent)


@every_variant
@pytest.mark.parametrize(("kv_heads", "group_size"), [(1, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("key_mode", [KeyMode.INT8, KeyMode.INT4])
def test_weights_that_fill_31_bits_together_go_the_long_way(
    key_mode, kv_heads, group_size, variant
):
    """One token outweighs all known ones by up to 2^24; a sum in 31 bits ends at 2^7 of them."""
    spec = KernelSpec(16, kv_heads, group_size, key_mode, Rule.WEIGHT_SUM, segment_tokens=512)
    scorer = native_scorer(variant, spec, Scope.LAYER)
    keys = torch.randn(512, kv_heads, 16, generator=torch.Generator().manual_seed(0)) * 0.02
    # No sink, no recent and no probe token.
    keys[100, :, 0] = 1.0
    golden = GoldenScorer(spec, Scope.LAYER)
    segments = segments_of(golden, keys.half())
    codes = []
    for half_bits in range(20, 60):
        query = torch.zeros(spec.query_heads, 16)
        query[:, 0] = half_bits / 2
        expected = golden.tuples(query, 0.6931472, segments)
        codes.append(int(expected[0, 100] >> 16))
        assert_same_tuples(scorer.tuples(query, 0.6931472, segments), expected)
    # A code has 1,024 steps per bit.
    assert codes == sorted(codes)
    assert codes[-1] - codes[0] > 16 * 1024
