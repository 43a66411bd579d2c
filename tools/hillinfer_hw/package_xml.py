# SPDX-License-Identifier: Apache-2.0
"""The description of an RTL kernel that Vivado packages with it into a kernel object (.xo)."""

from __future__ import annotations

from xml.etree import ElementTree

from hillinfer_hw.kernel_xml import REGISTER_RANGE, bundle_of
from hillinfer_hw.rtl_files import BUNDLES, argument_offsets, arguments
from hillinfer_model.kernel_spec import KernelSpec

VENDOR, LIBRARY, VERSION = "hillinfer", "kernel", "1.0"
CONTROL_PORT = "s_axi_control"
_ADDRESS_SPACE = "0xFFFFFFFFFFFFFFFF"


def memory_port(kernel: str, argument: str) -> str:
    """Return the AXI port that a pointer's memory is reached by, as the RTL names it."""
    return f"m_axi_{bundle_of(kernel, argument)}"


def package_xml(spec: KernelSpec, kernel: str) -> str:
    """Return the `kernel.xml` for Vivado's `package_xo`.

    Parameters
    ----------
    spec
        What the kernel was rendered from.
    kernel
        `score_tokens` or `make_shadow`.
    """
    root = ElementTree.Element("root", versionMajor="1", versionMinor="6")
    own = ElementTree.SubElement(
        root, "kernel", name=kernel, language="ip_c", attributes="",
        vlnv=f"{VENDOR}:{LIBRARY}:{kernel}:{VERSION}", preferredWorkGroupSizeMultiple="0",
        workGroupSize="1", interrupt="true", hwControlProtocol="ap_ctrl_chain",
    )  # fmt: skip
    ports = ElementTree.SubElement(own, "ports")
    for bundle in BUNDLES:
        ElementTree.SubElement(
            ports, "port", name=f"m_axi_{bundle}", mode="master", range=_ADDRESS_SPACE,
            dataWidth=str(spec.axi_bits), portType="addressable", base="0x0",
        )  # fmt: skip
    ElementTree.SubElement(
        ports, "port", name=CONTROL_PORT, mode="slave", range=hex(REGISTER_RANGE),
        dataWidth="32", portType="addressable", base="0x0",
    )  # fmt: skip
    pointers, _ = arguments(spec, kernel)
    entries = ElementTree.SubElement(own, "args")
    for index, (name, offset) in enumerate(argument_offsets(spec, kernel).items()):
        is_pointer = name in pointers
        size = "0x8" if is_pointer else "0x4"
        ElementTree.SubElement(
            entries, "arg", name=name, addressQualifier=str(int(is_pointer)), id=str(index),
            port=memory_port(kernel, name) if is_pointer else CONTROL_PORT, size=size,
            offset=hex(offset), hostOffset="0x0", hostSize=size,
            type="void*" if is_pointer else "uint",
        )  # fmt: skip
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
