# SPDX-License-Identifier: Apache-2.0
"""Runs the cocotb bench on a kernel: this project's RTL, or what a manifest describes."""

from __future__ import annotations

import os
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.rtl_files import RtlSource
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.verilate import verilator_bin
from hillinfer_model.beats import Beats
from hillinfer_model.launch_result import STATUS_FILL, LaunchResult

BENCH = ROOT / "hw" / "testbench" / "cocotb"
_BUILD_FLAGS = {
    "verilator": (
        *("-Wno-fatal", "-Wno-WIDTH", "-Wno-SYMRSVDWORD", "--no-timing", "-O3"),
        *("--x-assign", "fast", "--x-initial", "fast"),
    ),
    "icarus": ("-g2012",),
}


@dataclass(frozen=True)
class BenchResult:
    """What the bench said: names of the tests that passed and of those that failed."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]


def save_case(
    path: Path,
    buffers: Mapping[str, Beats],
    output_name: str,
    scalars: Mapping[str, int],
    golden: LaunchResult,
) -> None:
    """Write a launch and what golden makes of it where the bench reads it.

    Parameters
    ----------
    path
        A .npz file.
    buffers
        Before the launch, by argument; without the status buffer.
    output_name
        The argument that points to the output.
    scalars
        By argument.
    golden
        After the launch.
    """
    arrays: dict[str, Any] = {f"buffer_{name}": content for name, content in buffers.items()}
    arrays["buffer_status"] = np.full_like(golden.status, STATUS_FILL)
    arrays |= {f"scalar_{name}": np.array(value) for name, value in scalars.items()}
    arrays |= {"golden_output": golden.output, "golden_status": golden.status}
    arrays["output_name"] = np.array(output_name)
    np.savez(path, allow_pickle=False, **arrays)


def run_bench(source: RtlSource, case: Path, simulator: str, folder: Path) -> BenchResult:
    """Build and run the bench.

    Parameters
    ----------
    source
        What is simulated.
    case
        Written by `save_case`.
    simulator
        `verilator` or `icarus`.
    folder
        For everything the simulator writes.

    Raises
    ------
    MissingToolError
        Without cocotb or the simulator.
    """
    try:
        from cocotb_tools.runner import get_runner
    except ImportError as error:
        raise MissingToolError(
            "cocotb is missing: pip install cocotb==2.1.0 cocotbext-axi==0.1.28"
        ) from error
    if simulator == "icarus" and shutil.which("iverilog") is None:
        raise MissingToolError("Icarus Verilog is missing: on Debian, apt install iverilog")
    manifest = folder / "manifest.json"
    manifest.write_text(source.to_json())
    runner = get_runner(simulator)
    with _environment(simulator):
        runner.build(
            sources=list(source.files),
            hdl_toplevel=source.top,
            build_args=[*_BUILD_FLAGS[simulator], *source.flags.get(simulator, ())],
            build_dir=folder / "sim",
            timescale=("1ns", "1ps"),
            log_file=folder / "build.log",
        )
        results = runner.test(
            hdl_toplevel=source.top,
            test_module="kernel_bench",
            build_dir=folder / "sim",
            test_dir=folder,
            extra_env={
                "HILLINFER_MANIFEST": str(manifest),
                "HILLINFER_CASE": str(case),
            },
            log_file=folder / "test.log",
        )
    passed: list[str] = []
    failed: list[str] = []
    for test in ElementTree.parse(results).iter("testcase"):
        (passed if test.find("failure") is None else failed).append(test.attrib["name"])
    return BenchResult(tuple(passed), tuple(failed))


@contextmanager
def _environment(simulator: str) -> Iterator[None]:
    """Put the simulator of the Python package on PATH, and cure what its build left empty."""
    before = dict(os.environ)
    parts = [str(Path(sys.executable).parent), os.environ["PATH"]]
    if simulator == "verilator":
        parts.insert(0, str(verilator_bin()))
        flags = os.environ.get("MAKEFLAGS", "")
        os.environ["MAKEFLAGS"] = f"{flags} CFG_CXXFLAGS_PCH_I=-include".strip()
    os.environ["PATH"] = os.pathsep.join(parts)
    # The runner hands the simulator this process's search path.
    sys.path.insert(0, str(BENCH))
    try:
        yield
    finally:
        sys.path.remove(str(BENCH))
        os.environ.clear()
        os.environ.update(before)
