# SPDX-License-Identifier: Apache-2.0
"""The container of everything a card is loaded with (`struct axlf` of XRT's xclbin.h)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from hillinfer.devices.xrt.errors import XclbinError
from hillinfer.devices.xrt.section_kind import SectionKind
from hillinfer.plain_file import read_plain
from hillinfer.system_reason import reason_of

MAGIC = b"xclbin2\0"
HARDWARE, HW_EMU = 0, 4
# Magic, signature length (-1: none), 28 bytes of 0xFF, key block, unique number.
_TOP = struct.Struct("<8si28s256sQ")
# Length, two time stamps, version, mode, action mask, ROM uuid, platform, uuid, debug file, and
# the number of sections.
_HEADER = struct.Struct("<QQQHBBHH16s64s16s16sI4x")
# Kind, name, offset from the file's start, size.
_SECTION = struct.Struct("<I16s4xQQ")
_ALIGNMENT = 8
_XRT_VERSION = (2, 13)
_MOST_SECTIONS = 64
# Images of large cards have 100 MB.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Xclbin:
    """What an xclbin holds.

    Parameters
    ----------
    platform
        Name of the shell it was built for, up to 63 characters.
    uuid
        Its own number; XRT skips loading what is loaded already.
    mode
        0 for hardware, 4 for hw_emu.
    sections
        Content by kind. Kinds this project does not know are kept by their number.
    """

    platform: str
    uuid: UUID
    mode: int
    sections: Mapping[int, bytes]

    def pack(self) -> bytes:
        """Return the file's bytes.

        Raises
        ------
        ValueError
            Where the platform's name does not fit.
        """
        platform = self.platform.encode()
        if len(platform) > 63:
            raise ValueError(f"platform {self.platform!r} is longer than 63 characters")
        first = _TOP.size + _HEADER.size + _SECTION.size * len(self.sections)
        headers, body = b"", b""
        for kind, content in self.sections.items():
            body += b"\0" * (-(first + len(body)) % _ALIGNMENT)
            name = SectionKind(kind).name if kind in list(SectionKind) else ""
            headers += _SECTION.pack(kind, name.encode()[:15], first + len(body), len(content))
            body += content
        header = _HEADER.pack(
            first + len(body), 0, 0, 0, *_XRT_VERSION, self.mode, 0, bytes(16), platform,
            self.uuid.bytes, b"", len(self.sections),
        )  # fmt: skip
        # The unique number has no meaning to XRT beyond being unlike others.
        number = int.from_bytes(self.uuid.bytes[:8], "little")
        return _TOP.pack(MAGIC, -1, b"\xff" * 28, bytes(256), number) + header + headers + body

    @classmethod
    def unpack(cls, content: bytes, name: str) -> Xclbin:
        """Read a file's bytes.

        Parameters
        ----------
        content
            All of the file.
        name
            What error messages call it.

        Raises
        ------
        XclbinError
            Where it is no xclbin, is cut short, or its sections lie outside of it.
        """
        least = _TOP.size + _HEADER.size
        if not content.startswith(MAGIC):
            raise XclbinError(f"{name} is no xclbin: it does not start with {MAGIC[:7].decode()!r}")
        if len(content) < least:
            raise XclbinError(f"{name} is cut short: {len(content)} bytes, its header has {least}")
        fields = _HEADER.unpack_from(content, _TOP.size)
        length, mode, platform, uuid, count = (fields[i] for i in (0, 6, 9, 10, 12))
        if length != len(content):
            raise XclbinError(
                f"{name} is damaged or cut short: {len(content)} bytes, its header says {length}"
            )
        if count > _MOST_SECTIONS or least + count * _SECTION.size > len(content):
            raise XclbinError(f"{name} is damaged: its header says {count} sections")
        sections: dict[int, bytes] = {}
        taken: list[tuple[int, int]] = []
        for index in range(count):
            kind, _, offset, size = _SECTION.unpack_from(content, least + index * _SECTION.size)
            if offset < least or offset + size > len(content):
                raise XclbinError(f"{name} is damaged: section {kind} lies outside of the file")
            if kind in sections:
                raise XclbinError(f"{name} is damaged: section {kind} is there twice")
            if any(offset < end and start < offset + size for start, end in taken):
                raise XclbinError(f"{name} is damaged: section {kind} lies on another one")
            taken.append((offset, offset + size))
            sections[kind] = content[offset : offset + size]
        try:
            text = platform.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError:
            raise XclbinError(f"{name} is damaged: its platform's name is no text") from None
        return cls(text, UUID(bytes=uuid), mode, sections)

    @classmethod
    def read(cls, path: Path) -> Xclbin:
        """Read a file.

        Raises
        ------
        XclbinError
            Where it cannot be read, and as `unpack` does.
        """
        try:
            content = read_plain(path, _MOST_BYTES)
        except OSError as error:
            raise XclbinError(f"cannot read {path}: {reason_of(error)}") from error
        return cls.unpack(content, str(path))
