# SPDX-License-Identifier: Apache-2.0
"""The kernels on a card, as an xclbin's IP_LAYOUT and CONNECTIVITY list them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from hillinfer.devices.xrt.errors import XclbinError

_COUNT8, _COUNT4 = struct.Struct("<i4x"), struct.Struct("<i")
# Type, properties, base address, name.
_IP = struct.Struct("<IIQ64s")
_CONNECTION = struct.Struct("<iii")
_IP_KERNEL = 1
# Control protocol in bits 15:8 of the properties.
_PROTOCOL_SHIFT, _AP_CTRL_CHAIN = 8, 1


@dataclass(frozen=True)
class KernelInstance:
    """One kernel on a card.

    Parameters
    ----------
    kernel, instance
        Name of the kernel, and of this one of its instances.
    base
        Address of its registers.
    """

    kernel: str
    instance: str
    base: int


@dataclass(frozen=True, order=True)
class Connection:
    """Which memory an argument of a kernel reaches; all three are indices."""

    argument: int
    instance: int
    bank: int


def pack_instances(instances: Sequence[KernelInstance]) -> bytes:
    """Return the bytes of an IP_LAYOUT section; instances are to be sorted by address."""
    content = _COUNT8.pack(len(instances))
    for own in instances:
        name = f"{own.kernel}:{own.instance}".encode()
        content += _IP.pack(_IP_KERNEL, _AP_CTRL_CHAIN << _PROTOCOL_SHIFT, own.base, name)
    return content


def unpack_instances(content: bytes, name: str) -> list[KernelInstance]:
    """Read an IP_LAYOUT section; what is no kernel is left out.

    Raises
    ------
    XclbinError
        Where it is cut short.
    """
    count = _COUNT8.unpack_from(content)[0] if len(content) >= _COUNT8.size else -1
    if count < 0 or len(content) < _COUNT8.size + count * _IP.size:
        raise XclbinError(f"{name} is damaged: its list of kernels is cut short")
    found = []
    for index in range(count):
        kind, _, base, text = _IP.unpack_from(content, _COUNT8.size + index * _IP.size)
        if kind == _IP_KERNEL:
            kernel, _, instance = text.rstrip(b"\0").decode("ascii", "replace").partition(":")
            found.append(KernelInstance(kernel, instance, base))
    return found


def pack_connections(connections: Sequence[Connection]) -> bytes:
    """Return the bytes of a CONNECTIVITY section."""
    content = _COUNT4.pack(len(connections))
    for own in connections:
        content += _CONNECTION.pack(own.argument, own.instance, own.bank)
    return content


def unpack_connections(content: bytes, name: str) -> list[Connection]:
    """Read a CONNECTIVITY section.

    Raises
    ------
    XclbinError
        Where it is cut short.
    """
    count = _COUNT4.unpack_from(content)[0] if len(content) >= _COUNT4.size else -1
    if count < 0 or len(content) < _COUNT4.size + count * _CONNECTION.size:
        raise XclbinError(f"{name} is damaged: its list of connections is cut short")
    return [
        Connection(*_CONNECTION.unpack_from(content, _COUNT4.size + index * _CONNECTION.size))
        for index in range(count)
    ]
