# SPDX-License-Identifier: Apache-2.0
"""The steps from rendered sources to an xclbin: exact commands, what they read and write."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath

from hillinfer_hw.vitis_build import KernelSource, Target, VitisBuild
from hillinfer_hw.vitis_sources import LINK_CONFIG, compile_config, hls_names, rtl_names

RECORD = "spec_record.json"
# The name that XRT looks for.
EMULATION_CONFIG = "emconfig.json"


@dataclass(frozen=True)
class Step:
    """One command of a build.

    Parameters
    ----------
    name
        Unique in a build; its log is `logs/NAME.log`.
    command
        Program and arguments, to be run in the build folder.
    inputs
        Files that must be there before, relative to the build folder.
    outputs
        Files that must be there afterwards.
    """

    name: str
    command: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def log(self) -> str:
        """Where what the command printed is kept, relative to the build folder."""
        return f"logs/{self.name}.log"

    @property
    def line(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(self.command)


def flow_steps(build: VitisBuild) -> list[Step]:
    """Return the steps of a build in order, up to the packaged xclbin."""
    make = _compile_step if build.source is KernelSource.HLS else _package_kernel_step
    steps = [make(build, instance.kernel) for instance in build.instances]
    steps += [_link_step(build), _package_step(build)]
    if build.target is Target.HW_EMU:
        command = ("emconfigutil", "--platform", build.platform, "--od", ".")
        steps.append(Step("emconfig", command, (), (EMULATION_CONFIG,)))
    return steps


def record_step(build: VitisBuild) -> Step:
    """Return the step that adds the spec to the packaged xclbin, for the host to check."""
    packaged, finished = packaged_xclbin(build), finished_xclbin(build)
    command = (
        *("xclbinutil", "--force", "--input", packaged),
        *("--add-section", f"USER_METADATA:RAW:{RECORD}", "--output", finished),
    )
    return Step("record", command, (packaged, RECORD), (finished,))


def packaged_xclbin(build: VitisBuild) -> str:
    """Return where v++ leaves the xclbin."""
    return f"xclbin/{build.name}.xclbin"


def finished_xclbin(build: VitisBuild) -> str:
    """Return where the xclbin with the spec in it lies."""
    return f"{build.name}.xclbin"


def output_folders(build: VitisBuild) -> list[str]:
    """Return the folders that must be there before the first step: no tool makes them."""
    steps = [*flow_steps(build), record_step(build)]
    files = [file for step in steps for file in (step.log, *step.outputs)]
    return sorted({str(PurePosixPath(file).parent) for file in files} - {"."})


def programs(build: VitisBuild) -> list[str]:
    """Return every program that a build starts, in order of first use."""
    return list(dict.fromkeys(step.command[0] for step in [*flow_steps(build), record_step(build)]))


def _compile_step(build: VitisBuild, kernel: str) -> Step:
    name = f"compile_{kernel}"
    config, source, output = compile_config(kernel), f"src/{kernel}.cpp", f"xo/{kernel}.xo"
    command = (
        *("v++", "-c", *_common(build, name)),
        *("-k", kernel, "--config", config, "-I", "src", "-o", output, source),
    )
    sources = [f"src/{file}" for file in hls_names(kernel)]
    return Step(name, command, (config, *sources), (output,))


def _package_kernel_step(build: VitisBuild, kernel: str) -> Step:
    name = f"package_{kernel}"
    script, description = f"rtl/{kernel}.tcl", f"rtl/{kernel}.xml"
    command = (
        *("vivado", "-mode", "batch", "-nojournal", "-notrace"),
        *("-log", f"logs/vivado_{kernel}.log", "-source", script),
    )
    files = [f"rtl/{kernel}/{file}" for file in rtl_names(kernel)]
    return Step(name, command, (script, description, *files), (f"xo/{kernel}.xo",))


def _link_step(build: VitisBuild) -> Step:
    objects = tuple(f"xo/{instance.kernel}.xo" for instance in build.instances)
    output = f"link/{build.name}.link.xclbin"
    command = (
        *("v++", "-l", *_common(build, "link"), "--report_level", "2"),
        *("--config", LINK_CONFIG, "-o", output, *objects),
    )
    return Step("link", command, (LINK_CONFIG, *objects), (output,))


def _package_step(build: VitisBuild) -> Step:
    linked, output = f"link/{build.name}.link.xclbin", packaged_xclbin(build)
    command = (
        *("v++", "-p", "-t", build.target.value, "--platform", build.platform),
        *("--package.out_dir", "package", "-o", output, linked),
    )
    return Step("package", command, (linked,), (output,))


def _common(build: VitisBuild, name: str) -> tuple[str, ...]:
    """Return the options of compiling and linking."""
    debug = ("-g",) if build.target is Target.HW_EMU else ()
    return (
        *("-t", build.target.value, "--platform", build.platform, "--save-temps", *debug),
        *("--temp_dir", f"temp/{name}", "--report_dir", f"reports/{name}"),
        *("--log_dir", f"logs/{name}"),
    )
