# SPDX-License-Identifier: Apache-2.0
"""The description of kernels that an xclbin carries for XRT and PYNQ (EMBEDDED_METADATA)."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from hillinfer_hw.argument_list import add_arguments
from hillinfer_hw.kernel_ports import CONTROL_PORT, REGISTER_RANGE
from hillinfer_hw.rtl_files import BUNDLES
from hillinfer_hw.xclbin_sections import KernelInstance
from hillinfer_model.kernel_spec import KernelSpec

PROJECT = "hillinfer"
PART = "kintexuplus:xcku15p:ffva1156:-2LV:e"
CLOCK_MHZ = 300


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
        kernel, "port", name=CONTROL_PORT.upper(), portType="addressable", mode="slave",
        range=hex(REGISTER_RANGE), dataWidth="32", base="0x0",
    )  # fmt: skip
    add_arguments(kernel, spec, instance.kernel, str.upper)
    own = ElementTree.SubElement(kernel, "instance", name=instance.instance)
    ElementTree.SubElement(
        own, "addrRemap", base=hex(instance.base), range=hex(0x10000), port=CONTROL_PORT.upper()
    )
