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


# A change to one source, and the test of the bench that must fail with it.
MUTANTS = {
    "strobes_write_single_bytes": (
        "control_s_axi.sv",
        "scalars[32*i +: 32] <= (scalars[32*i +: 32] & ~mask) | (wdata & mask);",
        "scalars[32*i +: 32] <= wdata;",
    ),
    "address_before_data_and_data_before_address": (
        *("control_s_axi.sv", "assign wready = have_address && !bvalid;"),
        "assign wready = !bvalid;",
    ),
    "responses_wait": (*("control_s_axi.sv", "assign rvalid", "assign rvalid"),),
    "ready_is_cleared_by_reading": (
        *("control_s_axi.sv", "== 'h00) ready_seen <= 1'b0;", "== 'h04) ready_seen <= 1'b0;"),
    ),
    "auto_restart_runs_again_after_continue": (
        *("control_s_axi.sv", "ap_start <= auto_restart;", "ap_start <= 1'b0;"),
    ),
    "nothing_starts_before_continue": (
        *("launch.sv", "default: if (ap_continue) state <= IDLE;", "default: state <= IDLE;"),
    ),
    "interrupts_of_done_and_ready": (
        *("control_s_axi.sv", "if (ap_ready && enable[1])", "if (ap_ready)"),
    ),
    "interrupts_need_the_global_enable": (
        *("control_s_axi.sv", "assign interrupt = global_enable && ", "assign interrupt = "),
    ),
    "long_and_varying_read_latency": (
        *("axi_read.sv", "<= DEPTH[ROOM+1:0])", "<= DEPTH[ROOM+1:0] + DEPTH)"),
    ),
    "write_responses_late_and_in_bunches": (
        *("axi_write.sv", "&& (bursts != OUTSTANDING[COUNT:0])", ""),
    ),
    "ready_toggles": ("axi_write.sv", "(!awvalid || awready) && (!sending", "(!sending"),
    "reset_in_mid_launch": ("launch.sv", "if (rst) state <= IDLE;", "if (0) state <= IDLE;"),
}


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
