# SPDX-License-Identifier: Apache-2.0
"""Protocol, register map, back-to-back runs, stalls, reset and interrupt, in cocotb."""

import pytest
from launch_cases import random_launch
from rtl_kernels import SMALL

from hillinfer_hw.cocotb_bench import run_bench, save_case
from hillinfer_hw.rtl import launch_arguments
from hillinfer_hw.rtl_files import render_rtl
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_model.choices import Scope
from hillinfer_model.golden_launch import run_score_launch

TESTS = {
    "registers_hold_what_is_written",
    "two_runs_back_to_back",
    "random_stalls_on_every_channel",
    "a_wrong_bit_is_seen",
    "interrupt_of_done",
    "reset_in_mid_launch",
}


@pytest.mark.parametrize("simulator", ["verilator", "icarus"])
def test_hand_written_rtl(simulator, tmp_path):
    launch = random_launch(SMALL, Scope.KV_HEAD, [70, 0, 33])
    inputs, name, output, scalars = launch_arguments(SMALL, launch)
    case = tmp_path / "case.npz"
    golden = run_score_launch(SMALL, launch)
    save_case(case, {**inputs, name: output}, name, scalars, golden)
    try:
        result = run_bench(render_rtl(SMALL, "score_tokens"), case, simulator, tmp_path)
    except MissingToolError as missing:
        pytest.skip(str(missing))
    assert not result.failed
    assert set(result.passed) == TESTS
