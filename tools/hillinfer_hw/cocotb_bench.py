# SPDX-License-Identifier: Apache-2.0
"""Runs the cocotb bench on a kernel: this project's RTL, or what a manifest describes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.rtl import launch_arguments
from hillinfer_hw.rtl_files import RtlSource
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.verilate import verilator_bin
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_result import STATUS_FILL
from hillinfer_model.score_launch import ScoreLaunch
from hillinfer_model.shadow_launch import ShadowLaunch

BENCH = ROOT / "hw" / "testbench" / "cocotb"
_BUILD_FLAGS = {
    "verilator": (
        *("-Wno-fatal", "-Wno-WIDTH", "-Wno-SYMRSVDWORD", "--no-timing", "-O3"),
        *("--x-assign", "fast", "--x-initial", "fast"),
    ),
    "icarus": ("-g2012",),
}


# Modules of tests in `BENCH`.
_TESTS = ("launch_tests", "control_tests")
# What a launch of this project's RTL may take beside its beats: at both ends, and per segment.
_LAUNCH_CYCLES, _SEGMENT_CYCLES = 400, 60


@dataclass(frozen=True)
class BenchResult:
    """What the bench said.

    Parameters
    ----------
    passed, failed, skipped
        Names of tests; skipped are those that ask for what only this project's
        RTL promises.
    launches
        One per launch whose result was compared: test, tokens, mismatches, cycles.
    """

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    skipped: tuple[str, ...]
    launches: tuple[Mapping[str, Any], ...]


def save_case(path: Path, spec: KernelSpec, launch: ScoreLaunch | ShadowLaunch) -> None:
    """Write a launch and what golden makes of it where the bench reads it.

    Parameters
    ----------
    path
        A .npz file.
    spec, launch
        What golden runs.
    """
    buffers, output_name, output, scalars = launch_arguments(spec, launch)
    if isinstance(launch, ScoreLaunch):
        golden = run_score_launch(spec, launch)
    else:
        golden = run_shadow_launch(spec, launch)
    status = np.full_like(golden.status, STATUS_FILL)
    contents = {**buffers, output_name: output, "status": status}
    arrays: dict[str, Any] = {f"buffer_{name}": content for name, content in contents.items()}
    arrays |= {f"scalar_{name}": np.array(value) for name, value in scalars.items()}
    arrays |= {"golden_output": golden.output, "golden_status": golden.status}
    arrays["output_name"] = np.array(output_name)
    arrays["tokens"] = golden.status[:, 12:16].copy().view("<u4").sum(dtype=np.int64)
    arrays["most_cycles"] = np.array(
        sum(content.shape[0] for content in contents.values())
        + _LAUNCH_CYCLES
        + _SEGMENT_CYCLES * status.shape[0]
    )
    np.savez(path, allow_pickle=False, **arrays)


def run_bench(
    source: RtlSource, case: Path, simulator: str, folder: Path, only: str = ""
) -> BenchResult:
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
        For everything the simulator writes; made where it is not there.
    only
        Name of a single test; empty for all.

    Raises
    ------
    MissingToolError
        Without cocotb or the simulator.
    RuntimeError
        Where the simulator refuses the sources or ends without results; the message names the log.
    """
    try:
        from cocotb_tools.runner import get_runner
    except ImportError as error:
        raise MissingToolError(
            "cocotb is missing: pip install cocotb==2.1.0 cocotbext-axi==0.1.28"
        ) from error
    if simulator == "icarus" and shutil.which("iverilog") is None:
        raise MissingToolError("Icarus Verilog is missing: on Debian, apt install iverilog")
    folder.mkdir(parents=True, exist_ok=True)
    manifest, launches = folder / "manifest.json", folder / "launches.json"
    results = folder / "results.xml"
    for data in {path for source_file in source.files for path in source_file.parent.glob("*.dat")}:
        # Contents of memories: an export's sources name them as files beside the simulation.
        shutil.copy(data, folder)
    results.unlink(missing_ok=True)
    launches.write_text("")
    manifest.write_text(source.to_json())
    runner = get_runner(simulator)
    with _environment(simulator):
        try:
            runner.build(
                sources=list(source.files),
                hdl_toplevel=source.top,
                build_args=[*_BUILD_FLAGS[simulator], *source.flags.get(simulator, ())],
                build_dir=folder / "sim",
                timescale=("1ns", "1ps"),
                log_file=folder / "build.log",
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"{simulator} refuses the sources: {folder / 'build.log'}"
            ) from error
        # The runner ends the process where a test fails; what failed is in the results.
        with suppress(SystemExit):
            runner.test(
                hdl_toplevel=source.top,
                test_module=list(_TESTS),
                build_dir=folder / "sim",
                test_dir=folder,
                test_filter=rf"\.{only}$" if only else None,
                results_xml=str(results),
                extra_env={
                    "HILLINFER_MANIFEST": str(manifest),
                    "HILLINFER_CASE": str(case),
                    "HILLINFER_LAUNCHES": str(launches),
                },
                log_file=folder / "test.log",
            )
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for test in _test_cases(results):
        is_skipped = test.find("skipped") is not None
        has_failed = test.find("failure") is not None or test.find("error") is not None
        verdict = "skipped" if is_skipped else "failed" if has_failed else "passed"
        found[verdict].append(test.attrib["name"])
    return BenchResult(
        tuple(found["passed"]),
        tuple(found["failed"]),
        tuple(found["skipped"]),
        tuple(json.loads(line) for line in launches.read_text().splitlines()),
    )


def _test_cases(path: Path) -> list[ElementTree.Element]:
    if not path.exists():
        raise RuntimeError(f"the simulator ended without results: {path.with_name('test.log')}")
    return list(ElementTree.parse(path).iter("testcase"))


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
