# SPDX-License-Identifier: Apache-2.0
"""The description of kernels that an xclbin carries for XRT and PYNQ (EMBEDDED_METADATA)."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from hillinfer.devices.xrt.kernel_instance import KernelInstance
from hillinfer_hw.rtl_files import BUNDLES, argument_offsets, arguments
from hillinfer_model.kernel_spec import KernelSpec

PROJECT = "hillinfer"
PART = "kintexuplus:xcku15p:ffva1156:-2LV:e"
REGISTER_RANGE = 0x1000
CLOCK_MHZ = 300
_POINTER_BYTES, _SCALAR_BYTES = 8, 4
_SCALAR, _GLOBAL = "0", "1"


def bundle_of(kernel: str, argument: str) -> str:
    """Return the memory bundle of a pointer: keys, what else is read, or what is written."""
    if argument == ("shadow" if kernel == "score_tokens" else "rows"):
        return BUNDLES[0]
    written = ("scores", "status") if kernel == "score_tokens" else ("shadow", "status")
    return BUNDLES[2] if argument in written else BUNDLES[1]


def kernel_xml(spec: KernelSpec, instances: Sequence[KernelInstance], platform: str) -> bytes:
    """Return the XML text of the kernels of a spec.

    Parameters
    ----------
    spec
        What they were rendered from.
    instances
        One per kernel.
    platform
        Name of the shell.
    """
    project = ElementTree.Element("project", name=PROJECT)
    shell = ElementTree.SubElement(
        project, "platform", vendor="xilinx", boardid="u2", name=platform, featureRomTime="0"
    )
    ElementTree.SubElement(shell, "version", major="202110", minor="1")
    device = ElementTree.SubElement(shell, "device", name="fpga0", fpgaDevice=PART, addrWidth="0")
    core = ElementTree.SubElement(
        device, "core", name="OCL_REGION_0", target="hw_em", type="clc_region",
        clockFreq="0MHz", numComputeUnits=str(len(instances)),
    )  # fmt: skip
    clocks = ElementTree.SubElement(core, "kernelClocks")
    ElementTree.SubElement(clocks, "clock", port="KERNEL_CLK", frequency=f"{CLOCK_MHZ}MHz")
    for instance in instances:
        _add_kernel(core, spec, instance)
    ElementTree.indent(project)
    text: bytes = ElementTree.tostring(project, encoding="UTF-8", xml_declaration=True)
    return text


def _add_kernel(core: ElementTree.Element, spec: KernelSpec, instance: KernelInstance) -> None:
    kernel = ElementTree.SubElement(
        core, "kernel", name=instance.kernel, language="c", type="pl",
        vlnv=f"xilinx.com:hls:{instance.kernel}:1.0", hwControlProtocol="ap_ctrl_chain",
        interrupt="true", workGroupSize="1",
    )  # fmt: skip
    for bundle in BUNDLES:
        ElementTree.SubElement(
            kernel, "port", name=f"M_AXI_{bundle.upper()}", portType="addressable", mode="master",
            range="0xFFFFFFFFFFFFFFFF", dataWidth=str(spec.axi_bits), base="0x0",
        )  # fmt: skip
    ElementTree.SubElement(
        kernel, "port", name="S_AXI_CONTROL", portType="addressable", mode="slave",
        range=hex(REGISTER_RANGE), dataWidth="32", base="0x0",
    )  # fmt: skip
    pointers, _ = arguments(spec, instance.kernel)
    for index, (name, offset) in enumerate(argument_offsets(spec, instance.kernel).items()):
        is_pointer = name in pointers
        bundle = f"M_AXI_{bundle_of(instance.kernel, name).upper()}"
        port = bundle if is_pointer else "S_AXI_CONTROL"
        size = hex(_POINTER_BYTES if is_pointer else _SCALAR_BYTES)
        ElementTree.SubElement(
            kernel, "arg", name=name, addressQualifier=_GLOBAL if is_pointer else _SCALAR,
            id=str(index), port=port, size=size, offset=hex(offset), hostOffset="0x0",
            hostSize=size, type="void*" if is_pointer else "uint",
        )  # fmt: skip
    own = ElementTree.SubElement(kernel, "instance", name=instance.instance)
    ElementTree.SubElement(
        own, "addrRemap", base=hex(instance.base), range=hex(0x10000), port="S_AXI_CONTROL"
    )
