# SPDX-License-Identifier: Apache-2.0
"""The arguments of a kernel as XML: XRT, PYNQ and Vivado read the same list."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

from hillinfer_hw.kernel_ports import CONTROL_PORT, memory_port
from hillinfer_hw.rtl_files import argument_offsets, arguments
from hillinfer_model.kernel_spec import KernelSpec

_POINTER_BYTES, _SCALAR_BYTES = 8, 4
_SCALAR, _GLOBAL = "0", "1"


def add_arguments(
    parent: ElementTree.Element,
    spec: KernelSpec,
    kernel: str,
    port_name: Callable[[str], str] = str,
) -> None:
    """Append an element for each argument, in order of their registers.

    Parameters
    ----------
    parent
        Gets them.
    spec
        What the kernel was rendered from.
    kernel
        `score_tokens` or `make_shadow`.
    port_name
        Returns what the reader calls a port of the RTL.
    """
    pointers, _ = arguments(spec, kernel)
    for index, (name, offset) in enumerate(argument_offsets(spec, kernel).items()):
        is_pointer = name in pointers
        port = memory_port(kernel, name) if is_pointer else CONTROL_PORT
        size = hex(_POINTER_BYTES if is_pointer else _SCALAR_BYTES)
        ElementTree.SubElement(
            parent, "arg", name=name, addressQualifier=_GLOBAL if is_pointer else _SCALAR,
            id=str(index), port=port_name(port), size=size, offset=hex(offset), hostOffset="0x0",
            hostSize=size, type="void*" if is_pointer else "uint",
        )  # fmt: skip
