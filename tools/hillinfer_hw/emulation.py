# SPDX-License-Identifier: Apache-2.0
"""Everything that XRT's hw_emu needs beside XRT: the device process, an xclbin, a surrounding."""

from __future__ import annotations

import json
import shutil
from enum import StrEnum
from pathlib import Path

from hillinfer_hw.build_cache import ROOT, cached
from hillinfer_hw.csim_build import Scheduling, build_kernel
from hillinfer_hw.emulation_image import DDR_BYTES, PLATFORM, emulation_image, kernel_instances
from hillinfer_hw.rtl_files import arguments, render_rtl
from hillinfer_hw.run_tool import run_tool
from hillinfer_hw.surrounding import Surrounding, write_environment
from hillinfer_hw.toolchain import MissingToolError, find_compiler
from hillinfer_hw.verilate import build
from hillinfer_hw.xrt_binding import find_binding
from hillinfer_hw.xrt_installation import debian_xrt
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.memory_model import IDEAL, MemoryModel

EMULATION = ROOT / "hw" / "emulation"
HARNESS = ROOT / "hw" / "testbench" / "harness.h"
# XRT 2.13 as Debian ships it frees a reply buffer that it has not enlarged: no reply may be larger
# than the first message, so the first message is made large.
PACKET_BYTES = 131_072
PAD_BYTES = PACKET_BYTES + 4096
_LINKS = {
    "libxrt_hwemu.so.2": "libxrt_hwemu.so.2",
    "libxrt_hwemu.so": "libxrt_hwemu.so.2",
    "libxrt_core.so.2": "libxrt_core.so.2",
    # XRT's own Python scripts open this one for a device.
    "libxrt_core.so": "libxrt_hwemu.so.2",
    "libxrt_coreutil.so.2": "libxrt_coreutil.so.2",
    "libxrt_coreutil.so": "libxrt_coreutil.so.2",
}


class Engine(StrEnum):
    """What computes behind the emulated card."""

    RTL = "rtl"
    HLS = "hls"


def build_device_process() -> Path:
    """Return the program that plays the card, built once.

    Raises
    ------
    MissingToolError
        Without a compiler, protoc or the protobuf headers.
    RuntimeError
        Where a tool refuses the sources; the message is the tool's.
    """
    compiler = find_compiler()
    if shutil.which("protoc") is None:
        raise MissingToolError("protoc is missing: apt-get install protobuf-compiler")
    sources = sorted(p for p in EMULATION.iterdir() if p.suffix in (".cpp", ".h", ".proto"))

    def make(folder: Path) -> None:
        run_tool(
            ["protoc", f"--cpp_out={folder}", f"-I{EMULATION}", str(EMULATION / "calls.proto")]
        )
        # As one unit: protobuf's headers are half of what there is to compile.
        joined = folder / "device_and_calls.cpp"
        both = (EMULATION / "device.cpp", folder / "calls.pb.cc")
        joined.write_text("".join(f'#include "{one}"\n' for one in both), encoding="utf-8")
        units = [one for one in sorted(EMULATION.glob("*.cpp")) if one not in both]
        run_tool(
            [
                *(compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{folder}"),
                *(f"-I{EMULATION}", *map(str, (joined, *units)), "-o", str(folder / "device")),
                *("-lprotobuf-lite", "-ldl", "-pthread"),
            ]
        )

    contents = [path.read_bytes() for path in (*sources, HARNESS, Path(__file__))]
    return cached("hw_emu-device", contents, make) / "device"


def build_short_sleep() -> Path:
    """Return the library that shortens the driver's sleeps, built once."""
    source = EMULATION / "short_sleep.c"

    def make(folder: Path) -> None:
        library = str(folder / "short_sleep.so")
        run_tool(
            [find_compiler(), "-x", "c", "-O1", "-shared", "-fPIC", str(source), "-o", library]
        )

    return cached("hw_emu-sleep", [source.read_bytes()], make) / "short_sleep.so"


def device_config(spec: KernelSpec, engine: Engine, memory: MemoryModel = IDEAL) -> str:
    """Return the device process's configuration, its kernels built for it.

    Parameters
    ----------
    spec, engine
        What the kernels are of.
    memory
        How the card's behaves; compiled C++ has no cycles and takes no notice of it.
    """
    timing = (*memory.read_latency, *memory.write_latency, int(memory.shared_bus), *memory.refresh)
    lines = [f"memory {DDR_BYTES}", f"timing {' '.join(map(str, timing))}"]
    for instance in kernel_instances(spec):
        if engine is Engine.RTL:
            lines.append(f"rtl {instance.base} {build(render_rtl(spec, instance.kernel))}")
        else:
            library = build_kernel(instance.kernel, spec, Scheduling.SEQUENTIAL)
            pointers, scalars = arguments(spec, instance.kernel)
            counts = f"{len(pointers)} {len(scalars)}"
            lines.append(f"hls {instance.base} {library} {instance.kernel} {counts}")
    return "\n".join(lines) + "\n"


def make_surrounding(
    spec: KernelSpec, engine: Engine, folder: Path, memory: MemoryModel = IDEAL
) -> Surrounding:
    """Make an emulated card in a folder, which must not have spaces in its path.

    Parameters
    ----------
    spec, engine
        What its kernels are of.
    folder
        Where everything of it lies.
    memory
        How its memory behaves.

    Raises
    ------
    MissingToolError
        Without XRT or what the device process is built with.
    """
    xrt = debian_xrt()
    if " " in str(folder):
        raise ValueError(f"XRT's driver cannot work in {folder}: its path has a space")
    device = build_device_process()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    prefix = folder / "prefix" / "lib"
    prefix.mkdir(parents=True, exist_ok=True)
    for name, target in _LINKS.items():
        link = prefix / name
        link.unlink(missing_ok=True)
        link.symlink_to(xrt.libraries / target)
    (prefix.parent / "version.json").write_text('{"BUILD_VERSION": "2.13.466"}\n')
    (folder / "emconfig.json").write_text(json.dumps(_emconfig(), indent=1) + "\n")
    (folder / "xrt.ini").write_text(
        f"[Emulation]\npacket_size={PACKET_BYTES}\nsystem_dpa=false\n"
        "print_infos_in_console=false\nsuppress_infos=true\n"
        f"[Debug]\nrpc_pad={'x' * PAD_BYTES}\n"
    )
    files = {
        "simulate.sh": f"#!/bin/sh\nexec {device}\n".encode(),
        "device.conf": device_config(spec, engine, memory).encode(),
    }
    xclbin = folder / "kernels.xclbin"
    xclbin.write_bytes(emulation_image(spec, files).pack())
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    environment = {
        "XCL_EMULATION_MODE": "hw_emu",
        "XILINX_XRT": str(prefix.parent),
        "EMCONFIG_PATH": str(folder),
        "XRT_INI_PATH": str(folder / "xrt.ini"),
        "SDACCEL_EM_RUN_DIR": str(runs),
    }
    shell = {"LD_PRELOAD": str(build_short_sleep()), "PYTHONPATH": str(find_binding(xrt))}
    made = Surrounding(folder, xclbin, environment, shell)
    write_environment(made)
    return made


def _emconfig() -> dict[str, object]:
    device = {
        "Name": PLATFORM,
        "HalMajorVersion": "1",
        "HalMinorVersion": "0",
        "VendorId": "4334",
        "DeviceVersion": "0",
        "SubsystemVendorId": "0",
        "DdrBanks": [{"Size": "4G"}],
        # Misspelt in XRT.
        "OclFreqency": "300",
        "NumDevices": "1",
        "FeatureRom": {"Feature_Bitmap": "0", "Ddr_Channel_Count": "1", "Ddr_Channel_Size": "4"},
    }
    return {
        "Version": {"FileVersion": "2.0", "ToolVersion": "2022.1"},
        "Platform": {
            "UnifiedPlatform": "true",
            "ExpandedPR": "true",
            "Boards": [{"NumBoards": "1", "Devices": [device]}],
        },
    }
