# SPDX-License-Identifier: Apache-2.0
"""The lists of an xclbin that its builders write and the host has no use for: kernels, memories."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from hillinfer.devices.xrt.xclbin import XclbinError

# --- Kernels ---

_COUNT8 = struct.Struct("<i4x")
# Type, properties, base address, name.
_IP = struct.Struct("<IIQ64s")
_IP_KERNEL = 1
# Control protocol in bits 15:8 of the properties.
_PROTOCOL_SHIFT, _AP_CTRL_CHAIN = 8, 1


@dataclass(frozen=True)
class KernelInstance:
    """One kernel on a card, as an xclbin's IP_LAYOUT lists it.

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


# --- Connections ---

_COUNT, _CONNECTION = struct.Struct("<i"), struct.Struct("<iii")


@dataclass(frozen=True, order=True)
class Connection:
    """Which memory an argument of a kernel reaches; all three are indices."""

    argument: int
    instance: int
    bank: int


def pack_connections(connections: Sequence[Connection]) -> bytes:
    """Return the bytes of a CONNECTIVITY section."""
    content = _COUNT.pack(len(connections))
    for own in connections:
        content += _CONNECTION.pack(own.argument, own.instance, own.bank)
    return content


def unpack_connections(content: bytes, name: str) -> list[Connection]:
    """Read a CONNECTIVITY section.

    Raises XclbinError where it is cut short.
    """
    count = _COUNT.unpack_from(content)[0] if len(content) >= _COUNT.size else -1
    if count < 0 or len(content) < _COUNT.size + count * _CONNECTION.size:
        raise XclbinError(f"{name} is damaged: its list of connections is cut short")
    return [
        Connection(*_CONNECTION.unpack_from(content, _COUNT.size + index * _CONNECTION.size))
        for index in range(count)
    ]


# --- Memory banks ---

# Type, used, size in KiB, base address, tag.
_BANK = struct.Struct("<BB6xQQ16s")


class MemoryType(IntEnum):
    """Numbers of `MEM_TYPE` in XRT's xclbin.h, as far as this project uses them."""

    DDR4 = 1
    HOST = 10


@dataclass(frozen=True)
class MemoryBank:
    """One memory of a card, as an xclbin's MEM_TOPOLOGY lists it.

    Parameters
    ----------
    tag
        Its name, up to 15 characters; XRT tells banks by it.
    type
        What it is made of.
    size
        Bytes, a multiple of 1024.
    base
        Its first address on the card.
    """

    tag: str
    type: MemoryType
    size: int
    base: int


def pack_banks(banks: Sequence[MemoryBank]) -> bytes:
    """Return the bytes of a MEM_TOPOLOGY section."""
    content = _COUNT8.pack(len(banks))
    for bank in banks:
        content += _BANK.pack(bank.type, 1, bank.size // 1024, bank.base, bank.tag.encode())
    return content


def unpack_banks(content: bytes, name: str) -> list[MemoryBank]:
    """Read a MEM_TOPOLOGY section; banks that are not used are left out.

    Raises
    ------
    XclbinError
        Where it is cut short or names a memory of a type this project does not know.
    """
    count = _COUNT8.unpack_from(content)[0] if len(content) >= _COUNT8.size else -1
    if count < 0 or len(content) < _COUNT8.size + count * _BANK.size:
        raise XclbinError(f"{name} is damaged: its list of memories is cut short")
    banks = []
    for index in range(count):
        kind, used, size, base, tag = _BANK.unpack_from(content, _COUNT8.size + index * _BANK.size)
        if not used:
            continue
        if kind not in list(MemoryType):
            raise XclbinError(f"{name}: memory {index} is of unknown type {kind}")
        text = tag.rstrip(b"\0").decode("ascii", "replace")
        banks.append(MemoryBank(text, MemoryType(kind), size * 1024, base))
    return banks
