# SPDX-License-Identifier: Apache-2.0
"""The kernels and memories of a card, and which process has taken how much of them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from hillinfer.devices.xrt.xclbin import XclbinError

# --- Kernels ---

_COUNT8, _COUNT4 = struct.Struct("<i4x"), struct.Struct("<i")
# Type, properties, base address, name.
_IP = struct.Struct("<IIQ64s")
_CONNECTION = struct.Struct("<iii")
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


# --- Memory banks ---

_COUNT = struct.Struct("<i4x")
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


# --- Memory taken by processes ---


class MemoryClaims:
    """The claims of one process on one card, beside those of the user's other processes.

    First come, first served, piece by piece: a claim is admitted while all of them fit in the
    card's memory, and those of processes that have ended do not count. Processes of other users
    are not seen here; where the card has no memory left for a claim, it is given back.

    Parameters
    ----------
    folder
        Where the claims of all cards lie, owner-only.
    card
        Names the card.
    memory_bytes
        What all processes together may take.
    """

    def __init__(self, folder: Path, card: str, memory_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A card's name is no file's.
        self._path = folder / f"{hashlib.sha256(card.encode()).hexdigest()[:16]}.json"
        self._memory_bytes = memory_bytes
        self._own = f"{os.getpid()} {_start_of(os.getpid())} {id(self):x}"

    def claim(self, size: int) -> bool:
        """Take bytes; False where they do not fit beside what all processes hold."""
        with self._claims() as claims:
            if sum(claims.values()) + size > self._memory_bytes:
                return False
            claims[self._own] = claims.get(self._own, 0) + size
            return True

    def give_back(self, size: int) -> None:
        """Let go of bytes that were claimed and could not be taken."""
        with self._claims() as claims:
            claims[self._own] = claims.get(self._own, 0) - size

    def release(self) -> None:
        """Let go of everything; harmless when done twice."""
        with self._claims() as claims:
            claims.pop(self._own, None)

    @contextmanager
    def _claims(self) -> Iterator[dict[str, int]]:
        """Yield the claims of living processes, and keep what the block makes of them."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            claims = _living(os.pread(file, 1 << 20, 0))
            yield claims
            content = json.dumps(claims).encode()
            os.ftruncate(file, 0)
            os.pwrite(file, content, 0)
        finally:
            os.close(file)


def _living(content: bytes) -> dict[str, int]:
    """Return the claims whose processes still run; none where the file says nothing sensible."""
    try:
        claims = json.loads(content or b"{}")
    except ValueError:
        return {}
    living = {}
    for own, size in claims.items() if isinstance(claims, dict) else ():
        pid, start, _ = (*own.split(), "", "", "")[:3]
        if pid.isdigit() and isinstance(size, int) and start == _start_of(int(pid)):
            living[own] = size
    return living


def _start_of(pid: int) -> str:
    """Return when a process started, as its number may come again; empty if there is none."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in brackets may hold anything, so fields count from its end.
    return content.rpartition(")")[2].split()[19]
