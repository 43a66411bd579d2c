# SPDX-License-Identifier: Apache-2.0
"""Launches, register map, control protocol, interrupts and reset, in cocotb.

`make cocotb` runs the same bench over the same kernels into a report.
"""

import ast
from dataclasses import replace

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


# Tests of the bench, and a change to one source with which each must fail.
MUTANTS = {
    "two_runs_back_to_back": ("control_s_axi.sv", "&& wdata[4];", "&& wdata[5];"),
    "ready_toggles": ("axi_write.sv", "(!awvalid || awready) && (!sending", "(!sending"),
    "random_stalls_on_every_channel": (
        "fifo.sv",
        "(held != 0) && (!out_valid || out_ready)",
        "(held != 0)",
    ),
    "write_responses_late_and_in_bunches": (
        "axi_write.sv",
        "assign busy = held || open || (total != 0);",
        "assign busy = held || open;",
    ),
    "long_and_varying_read_latency": (
        "key_reader.sv",
        "assign key_valid = beat_valid && owner_valid",
        "assign key_valid = owner_valid",
    ),
    "reset_in_mid_launch": (
        "launch.sv",
        "if (rst) state <= IDLE;",
        "if (rst && ap_done) state <= IDLE;",
    ),
    "strobes_write_single_bytes": (
        "control_s_axi.sv",
        "pointers[64*i +: 32] <= (pointers[64*i +: 32] & ~mask) | (wdata & mask);",
        "pointers[64*i +: 32] <= wdata;",
    ),
    "arguments_do_not_share_registers": (
        "control_s_axi.sv",
        "address == 20 + 12 * i",
        "address == 16 + 12 * i",
    ),
    "address_before_data_and_data_before_address": (
        "control_s_axi.sv",
        "else if (write) have_address <= 1'b0;",
        "else have_address <= 1'b0;",
    ),
    "responses_wait": (
        "control_s_axi.sv",
        "else if (rready) rvalid <= 1'b0;",
        "else rvalid <= 1'b0;",
    ),
    "ready_is_cleared_by_reading": (
        "control_s_axi.sv",
        "== 'h00) ready_seen <= 1'b0;",
        "== 'h04) ready_seen <= 1'b0;",
    ),
    "auto_restart_runs_again_after_continue": (
        "control_s_axi.sv",
        "ap_start <= auto_restart;",
        "ap_start <= 1'b0;",
    ),
    "nothing_starts_before_continue": (
        "launch.sv",
        "default: if (ap_continue)",
        "default: if (ap_continue || ap_start)",
    ),
    "interrupts_of_done_and_ready": (
        "control_s_axi.sv",
        "if (ap_ready && enable[1])",
        "if (ap_ready)",
    ),
    "interrupts_need_the_global_enable": (
        "control_s_axi.sv",
        "assign interrupt = global_enable && ",
        "assign interrupt = ",
    ),
}


@pytest.mark.parametrize("test", MUTANTS)
def test_a_wrong_kernel_fails(test, tmp_path):
    """The twin: each test sees the mistake that it is there for."""
    kernel = COCOTB_KERNELS["int8-raw_sum"]
    source = render_rtl(kernel.spec, kernel.name)
    name, old, new = MUTANTS[test]
    own = tmp_path / name
    text = next(path for path in source.files if path.name == name).read_text()
    assert text.count(old) == 1
    own.write_text(text.replace(old, new))
    files = tuple(own if path.name == name else path for path in source.files)
    case = tmp_path / "case.npz"
    save_case(case, kernel.spec, kernel.launch)
    try:
        result = run_bench(replace(source, files=files), case, "icarus", tmp_path, test)
    except MissingToolError as missing:
        pytest.skip(str(missing))
    assert result.failed == (test,)
    assert not result.passed


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
