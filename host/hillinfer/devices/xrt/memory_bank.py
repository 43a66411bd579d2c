# SPDX-License-Identifier: Apache-2.0
"""The memories of a card, as an xclbin's MEM_TOPOLOGY lists them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from hillinfer.devices.xrt.errors import XclbinError

_COUNT = struct.Struct("<i4x")
# Type, used, size in KiB, base address, tag.
_BANK = struct.Struct("<BB6xQQ16s")


class MemoryType(IntEnum):
    """Numbers of `MEM_TYPE` in XRT's xclbin.h, as far as this project uses them."""

    DDR4 = 1
    HOST = 10


@dataclass(frozen=True)
class MemoryBank:
    """One memory.

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
    content = _COUNT.pack(len(banks))
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
    count = _COUNT.unpack_from(content)[0] if len(content) >= _COUNT.size else -1
    if count < 0 or len(content) < _COUNT.size + count * _BANK.size:
        raise XclbinError(f"{name} is damaged: its list of memories is cut short")
    banks = []
    for index in range(count):
        kind, used, size, base, tag = _BANK.unpack_from(content, _COUNT.size + index * _BANK.size)
        if not used:
            continue
        if kind not in list(MemoryType):
            raise XclbinError(f"{name}: memory {index} is of unknown type {kind}")
        text = tag.rstrip(b"\0").decode("ascii", "replace")
        banks.append(MemoryBank(text, MemoryType(kind), size * 1024, base))
    return banks
