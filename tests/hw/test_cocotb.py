# SPDX-License-Identifier: Apache-2.0
"""Launches, register map, control protocol, interrupts and reset, in cocotb.

`make cocotb` runs the same bench over the same kernels into a report.
"""

import ast

import pytest
from cocotb_kernels import COCOTB_KERNELS

from hillinfer_hw.cocotb_bench import BENCH, run_bench, save_case
from hillinfer_hw.rtl_files import render_rtl
from hillinfer_hw.toolchain import MissingToolError

# Verilator for all; the second simulator for one of each kernel.
RUNS = [
    *(("verilator", name) for name in COCOTB_KERNELS),
    *(("icarus", name) for name in ("int8-raw_sum", "make_shadow-int4")),
]


def written_tests():
    """Names of the test functions in the bench's sources."""
    for path in BENCH.glob("*_tests.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AsyncFunctionDef) and node.decorator_list:
                yield node.name


@pytest.mark.parametrize(("simulator", "name"), RUNS)
def test_hand_written_rtl(simulator, name, tmp_path):
    kernel = COCOTB_KERNELS[name]
    case = tmp_path / "case.npz"
    save_case(case, kernel.spec, kernel.launch)
    try:
        result = run_bench(render_rtl(kernel.spec, kernel.name), case, simulator, tmp_path)
    except MissingToolError as missing:
        pytest.skip(str(missing))
    assert not result.failed
    assert not result.skipped
    assert sorted(result.passed) == sorted(written_tests())
    assert sum(row["tokens"] for row in result.launches) > 0
    assert not any(row["mismatches"] for row in result.launches)
