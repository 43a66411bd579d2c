# SPDX-License-Identifier: Apache-2.0
"""Hides host memory in an xclbin: PYNQ 3.0.1 knows memory types up to 9, and that is type 10."""

from __future__ import annotations

import struct
from dataclasses import replace

from hillinfer.devices.xrt.card_memory import MemoryType, unpack_connections
from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin, XclbinError, spec_record
from hillinfer_model.kernel_spec import KernelSpec

_COUNT = struct.Struct("<i4x")
_BANK_BYTES = 40
# `MEM_DRAM` of XRT's xclbin.h, a type that PYNQ knows; not used, so nobody asks what it is.
_DRAM, _UNUSED = 2, 0


def without_host_memory(xclbin: Xclbin, spec: KernelSpec, name: str) -> Xclbin:
    """Return the xclbin with its banks of host memory marked as not used.

    Banks keep their numbers, which connections name.

    Parameters
    ----------
    xclbin
        Checked against the spec.
    spec
        Its kernels'.
    name
        What error messages call it.

    Raises
    ------
    XclbinError
        Where its list of memories is missing or cut short, or a kernel reaches host memory.
    """
    topology = bytearray(xclbin.sections.get(SectionKind.MEM_TOPOLOGY, b""))
    count = _COUNT.unpack_from(topology)[0] if len(topology) >= _COUNT.size else -1
    if count < 0 or len(topology) < _COUNT.size + count * _BANK_BYTES:
        raise XclbinError(f"{name} is damaged: its list of memories is missing or cut short")
    places = {index: _COUNT.size + index * _BANK_BYTES for index in range(count)}
    hidden = {index for index, place in places.items() if topology[place] == MemoryType.HOST}
    if not hidden:
        return xclbin
    connections = unpack_connections(xclbin.sections.get(SectionKind.CONNECTIVITY, b""), name)
    if any(connection.bank in hidden for connection in connections):
        raise XclbinError(f"{name}: a kernel reaches host memory, which PYNQ 3.0.1 does not know")
    for index in hidden:
        topology[places[index] : places[index] + 2] = bytes((_DRAM, _UNUSED))
    sections = {**xclbin.sections, SectionKind.MEM_TOPOLOGY: bytes(topology)}
    del sections[SectionKind.USER_METADATA]
    sections[SectionKind.USER_METADATA] = spec_record(spec, sections)
    return replace(xclbin, sections=sections)
