# SPDX-License-Identifier: Apache-2.0
"""Build an xclbin for a SmartSSD with Vitis, check its reports and describe it (`make bitstream`).

Exit code 0: xclbin and manifest are in --out. 1: a tool failed, timing is not met or the kernels
do not fit; the line that says so is printed, and nothing is put into --out. 2: it cannot start:
Vitis or the platform is missing (the commands are printed, sources and configurations rendered),
or a setting is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hillinfer.devices.xrt.xclbin import XclbinError
from hillinfer_hw.build_cache import BUILD, ROOT
from hillinfer_hw.emulation_image import PLATFORM
from hillinfer_hw.kernel_xml import CLOCK_MHZ
from hillinfer_hw.vitis_build import KernelSource, Target, VitisBuild, VitisBuildError
from hillinfer_hw.vitis_flow import (
    RECORD,
    Step,
    flow_steps,
    output_folders,
    programs,
    record_step,
)
from hillinfer_hw.vitis_run import BuildFailedError, run_steps
from hillinfer_hw.vitis_sources import write_sources
from hillinfer_hw.vitis_tools import missing
from hillinfer_hw.vitis_xclbin import finish, named_build, render_anew
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle
from hillinfer_model.presets import PRESETS, preset_spec

CANNOT_START = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or say what is missing; see the module's text for the exit codes."""
    given = _parser().parse_args(argv)
    try:
        build = _build(given)
        absent = missing(programs(build), given.platform)
        if not given.finish:
            # Without the tools, sources are rendered to be read, over what an earlier build left.
            (write_sources if absent else render_anew)(build)
    except (ValueError, OSError) as error:
        # HardwareSpecError and VitisBuildError are ValueErrors.
        print(f"bitstream: {error}", file=sys.stderr)
        return CANNOT_START
    steps = flow_steps(build)
    if absent:
        _print_commands(build, steps, absent)
        return CANNOT_START
    try:
        if not given.finish:
            run_steps(steps, build.folder, sys.stdout)
        finish(build, given.out, sys.stdout)
    except (BuildFailedError, XclbinError, OSError) as error:
        print(f"bitstream: {build.name} failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"bitstream: {build.name} was interrupted", file=sys.stderr)
        return 1
    return 0


def _build(given: argparse.Namespace) -> VitisBuild:
    if given.spec is None:
        spec = preset_spec(given.preset, KeyMode(given.mode), Rule(given.rule))
        stem = f"{given.preset}-{given.mode}-{given.rule}"
    else:
        spec, stem = _read_spec(given.spec), given.spec.stem
    return named_build(
        stem,
        spec,
        KernelSource(given.kernels),
        Target(given.target),
        given.platform,
        given.frequency,
        given.build,
    )


def _read_spec(path: Path) -> KernelSpec:
    """Read the JSON of a KernelSpec, as a manifest's `spec` has it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise VitisBuildError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise VitisBuildError(f"{path} is no JSON: {error}") from error
    known = {field.name for field in fields(KernelSpec)}
    if not isinstance(values, dict) or not set(values) <= known:
        raise VitisBuildError(
            f"{path} is no kernel spec; its fields are {', '.join(sorted(known))}"
        )
    kinds = {"key_mode": KeyMode, "rule": Rule, "product_style": ProductStyle}
    try:
        typed: dict[str, Any] = {name: kinds.get(name, int)(own) for name, own in values.items()}
        return KernelSpec(**typed)
    except TypeError as error:
        raise VitisBuildError(f"{path} is no whole kernel spec: {error}") from error


def _print_commands(build: VitisBuild, steps: Sequence[Step], absent: Sequence[str]) -> None:
    print("These commands would run:\n")
    print(f"cd {build.folder}")
    print(f"mkdir -p {' '.join(output_folders(build))}")
    for step in steps:
        print(step.line)
    print(f"# {RECORD} is made from the packaged xclbin, after the reports were checked.")
    print(record_step(build).line)
    print("\nSources and configurations are rendered there. Missing on this machine:")
    for line in absent:
        print(f"- {line}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--preset", choices=list(PRESETS), default="smollm2-135m")
    what.add_argument("--spec", type=Path, help="JSON of a kernel spec, instead of a preset")
    parser.add_argument("--mode", choices=[mode.value for mode in KeyMode], default="int4")
    parser.add_argument("--rule", choices=[rule.value for rule in Rule], default="weight_sum")
    sources = [source.value for source in KernelSource]
    parser.add_argument("--kernels", choices=sources, default="hls", help="HLS C++ or RTL")
    targets = [target.value for target in Target]
    parser.add_argument("--target", "-t", choices=targets, default="hw")
    parser.add_argument("--platform", default=PLATFORM, help="name, or path of an .xpfm")
    parser.add_argument("--frequency", type=int, default=CLOCK_MHZ, help="MHz to ask for")
    parser.add_argument("--out", type=Path, default=ROOT / "bitstreams")
    parser.add_argument("--build", type=Path, default=BUILD / "vitis", help="where to build")
    parser.add_argument(
        "--finish",
        action="store_true",
        help="run no compiler: check and publish what an earlier run has linked and packaged",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
