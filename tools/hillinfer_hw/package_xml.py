# SPDX-License-Identifier: Apache-2.0
"""The description of an RTL kernel that Vivado packages with it into a kernel object (.xo)."""

from __future__ import annotations

from xml.etree import ElementTree

from hillinfer_hw.argument_list import add_arguments
from hillinfer_hw.kernel_ports import CONTROL_PORT, REGISTER_RANGE
from hillinfer_hw.rtl_files import BUNDLES
from hillinfer_model.kernel_spec import KernelSpec

VENDOR, LIBRARY, VERSION = "hillinfer", "kernel", "1.0"
_ADDRESS_SPACE = "0xFFFFFFFFFFFFFFFF"


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
    add_arguments(ElementTree.SubElement(own, "args"), spec, kernel)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
