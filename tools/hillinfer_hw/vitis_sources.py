# SPDX-License-Identifier: Apache-2.0
"""Everything that Vitis reads: rendered sources, configurations and packaging scripts."""

from __future__ import annotations

import re
from pathlib import Path

from hillinfer_hw.csim_build import HLS, rendered_sources
from hillinfer_hw.emulation_image import BANKS
from hillinfer_hw.kernel_ports import CONTROL_PORT, memory_port
from hillinfer_hw.package_xml import LIBRARY, VENDOR, package_xml
from hillinfer_hw.render import HARDWARE, render
from hillinfer_hw.rtl_files import BUNDLES, RTL, argument_offsets, arguments, rtl_context
from hillinfer_hw.vitis_build import KernelSource, VitisBuild
from hillinfer_model.kernel_spec import KernelSpec

VITIS = HARDWARE / "vitis"
PART = "xcku15p-ffva1156-2LV-e"
LINK_CONFIG = "cfg/link.cfg"
_PORT = re.compile(r"^ +(input|output) +logic +(\[[^\]]+\])? *(\w+),?$", re.MULTILINE)
# Vitis HLS takes pragmas and names loops by file and line, so its sources must be the files that
# they say they are.
_LINE_MARK = re.compile(r'^[#`]line \d+ "[^"]*"(?: 0)?\n', re.MULTILINE)


def compile_config(kernel: str) -> str:
    """Return where the configuration of a kernel's compilation lies in the build folder."""
    return f"cfg/compile_{kernel}.cfg"


def hls_names(kernel: str) -> list[str]:
    """Return the names of a kernel's C++ files, its top last."""
    return [*sorted({*(path.name for path in HLS.glob("*.h")), "spec.h"}), f"{kernel}.cpp"]


def rtl_names(kernel: str) -> list[str]:
    """Return the names of a kernel's RTL files, its top last."""
    inner = f"{_inner(kernel)}.sv"
    return [*sorted([*(path.name for path in RTL.glob("*.sv")), inner]), f"{kernel}.v"]


def hls_sources(spec: KernelSpec, kernel: str) -> dict[str, str]:
    """Return the rendered C++ of a kernel and the headers it includes, by name.

    The stand-ins for vendor headers that simulations need are not among them: Vitis has its own.
    """
    headers = {path.name: path.read_text(encoding="utf-8") for path in sorted(HLS.glob("*.h"))}
    rendered = rendered_sources(kernel, spec)
    return headers | {name: _LINE_MARK.sub("", text) for name, text in rendered.items()}


def rtl_sources(spec: KernelSpec, kernel: str) -> dict[str, str]:
    """Return the RTL of a kernel by name: its parts, and a top in Verilog around them.

    The rendered top in SystemVerilog gives its name to the one in Verilog, which Vivado packages.
    """
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(RTL.glob("*.sv"))}
    rendered = render(RTL / f"{kernel}.sv.j2", spec, **rtl_context(spec, kernel))
    inner = _inner(kernel)
    text = _LINE_MARK.sub("", rendered).replace(f"\nmodule {kernel} #(", f"\nmodule {inner} #(")
    top = render(VITIS / "kernel.v.j2", spec, kernel=kernel, inner=inner, ports=_ports(text))
    return files | {f"{inner}.sv": text, f"{kernel}.v": top}


def _inner(kernel: str) -> str:
    return f"{kernel}_inner"


def _ports(source: str) -> list[dict[str, str]]:
    """Return direction, range and name of every port of a top."""
    return [
        {"direction": direction, "range": f"{width} " if width else "", "name": name}
        for direction, width, name in _PORT.findall(source.split(");\n", 1)[0])
    ]


def write_sources(build: VitisBuild) -> None:
    """Write every input of a build into its folder.

    Raises
    ------
    OSError
        Where the folder cannot be written.
    """
    spec = build.spec
    for instance in build.instances:
        kernel = instance.kernel
        if build.source is KernelSource.HLS:
            for name, text in hls_sources(spec, kernel).items():
                _write(build.folder / "src" / name, text)
            config = render(
                VITIS / "compile.cfg.j2", spec, kernel=kernel, frequency=build.frequency
            )
            _write(build.folder / compile_config(kernel), config)
        else:
            _write_rtl(build.folder, spec, kernel)
    link = render(
        VITIS / "link.cfg.j2",
        spec,
        frequency=build.frequency,
        instances=build.instances,
        pointers={own.kernel: arguments(spec, own.kernel)[0] for own in build.instances},
        bank=BANKS[0].tag,
    )
    _write(build.folder / LINK_CONFIG, link)


def _write_rtl(folder: Path, spec: KernelSpec, kernel: str) -> None:
    for name, text in rtl_sources(spec, kernel).items():
        _write(folder / "rtl" / kernel / name, text)
    _write(folder / "rtl" / f"{kernel}.xml", package_xml(spec, kernel))
    pointers, _ = arguments(spec, kernel)
    masters = [f"m_axi_{bundle}" for bundle in BUNDLES]
    script = render(
        VITIS / "package_kernel.tcl.j2",
        spec,
        kernel=kernel,
        part=PART,
        vendor=VENDOR,
        library=LIBRARY,
        files=[f"rtl/{kernel}/{name}" for name in rtl_names(kernel)],
        ports=[*masters, CONTROL_PORT],
        masters=masters,
        registers=[
            {
                "name": name,
                "offset": f"{offset:#05x}",
                "bits": 64 if name in pointers else 32,
                "bus": memory_port(kernel, name) if name in pointers else "",
            }
            for name, offset in argument_offsets(spec, kernel).items()
        ],
        ip_folder=f"ip/{kernel}",
        kernel_xml=f"rtl/{kernel}.xml",
        kernel_object=f"xo/{kernel}.xo",
    )
    _write(folder / "rtl" / f"{kernel}.tcl", script)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
