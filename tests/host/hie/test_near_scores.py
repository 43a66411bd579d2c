# SPDX-License-Identifier: Apache-2.0
"""The short way to L' is the long one's number wherever it says that it fits."""

import shutil
import subprocess
from pathlib import Path

import pytest

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
