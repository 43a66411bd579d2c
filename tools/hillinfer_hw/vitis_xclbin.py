# SPDX-License-Identifier: Apache-2.0
"""Prepares a build with Vitis, and checks and records the xclbin when it is done."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TextIO

from hillinfer.devices.xrt.xclbin import Xclbin, check_xclbin, spec_record
from hillinfer_hw.bitstream_evidence import collect_evidence
from hillinfer_hw.bitstream_manifest import manifest, publish
from hillinfer_hw.vitis_build import KernelSource, Target, VitisBuild
from hillinfer_hw.vitis_flow import (
    RECORD,
    finished_xclbin,
    flow_steps,
    packaged_xclbin,
    programs,
    record_step,
)
from hillinfer_hw.vitis_run import run_step
from hillinfer_hw.vitis_sources import write_sources
from hillinfer_hw.vitis_tools import find_platform, tool_versions
from hillinfer_model.kernel_spec import KernelSpec


def named_build(
    stem: str,
    spec: KernelSpec,
    source: KernelSource,
    target: Target,
    platform: str,
    frequency: int,
    parent: Path,
) -> VitisBuild:
    """Return a build whose name and folder say what it is of.

    Parameters
    ----------
    stem
        What the spec is called.
    spec, source, target, frequency
        As `VitisBuild` has them.
    platform
        Its name or the path of its `.xpfm`; a name is replaced by the path where it is installed.
    parent
        Folder of the build folder.

    Raises
    ------
    HardwareSpecError, VitisBuildError
        As `VitisBuild` does.
    """
    name = f"{stem}-{source}" + ("" if target is Target.HW else f"-{target}")
    found = str(find_platform(platform) or platform)
    return VitisBuild(name, spec, source, target, found, frequency, (parent / name).resolve())


def render_anew(build: VitisBuild) -> None:
    """Render a build's sources into an empty folder."""
    # What an earlier build left must not be taken for a result of this one.
    shutil.rmtree(build.folder, ignore_errors=True)
    write_sources(build)


def finish(build: VitisBuild, out: Path, echo: TextIO) -> Path:
    """Check a linked and packaged build, add its spec to the xclbin, and publish it.

    Parameters
    ----------
    build
        All of its steps have run.
    out
        Folder for xclbin and manifest.
    echo
        Where warnings and the published files are told.

    Returns
    -------
    Path of the published xclbin.

    Raises
    ------
    BuildFailedError
        Where the reports say that the xclbin is no use.
    XclbinError
        Where the result is not what the host accepts.
    """
    evidence = collect_evidence(build)
    packaged = Xclbin.read(build.folder / packaged_xclbin(build))
    (build.folder / RECORD).write_bytes(spec_record(build.spec, packaged.sections))
    last = record_step(build)
    run_step(last, build.folder, echo)
    path = build.folder / finished_xclbin(build)
    check_xclbin(Xclbin.read(path), build.spec, build.platform_name, str(path))
    steps = [*flow_steps(build), last]
    content = manifest(build, evidence, tool_versions(programs(build)), steps)
    for warning in evidence.warnings:
        print(f"warning: {warning}", file=echo)
    xclbin, described = publish(build, content, out)
    print(f"bitstream: {xclbin}\nbitstream: {described}", file=echo)
    return xclbin
