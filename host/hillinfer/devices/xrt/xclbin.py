# SPDX-License-Identifier: Apache-2.0
"""Reads an xclbin: its sections, and the kernel spec it was built for."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

from hillinfer.errors import SettingsError, reason_of
from hillinfer.system.files import read_plain
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle

# --- Errors and sections ---


class XclbinError(SettingsError):
    """An xclbin that cannot be used; the message names the file and the reason."""


class SectionKind(IntEnum):
    """Numbers of `axlf_section_kind` in XRT's xclbin.h."""

    BITSTREAM = 0
    EMBEDDED_METADATA = 2
    MEM_TOPOLOGY = 6
    CONNECTIVITY = 7
    IP_LAYOUT = 8
    CLOCK_FREQ_TOPOLOGY = 11
    BUILD_METADATA = 14
    USER_METADATA = 16


# --- The container ---

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
    """What an xclbin holds, the container that a card is loaded with (XRT's `struct axlf`).

    `platform` is the name of the shell it was built for, up to 63 characters, and `uuid` its own
    number; XRT skips loading what is loaded already. `mode` is 0 for hardware, 4 for hw_emu.
    Sections that this project does not know are kept by the number of their kind.
    """

    platform: str
    uuid: UUID
    mode: int
    sections: Mapping[int, bytes]

    def pack(self) -> bytes:
        """Return the file's bytes; ValueError where the platform's name does not fit."""
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

        `content` is all of the file, which error messages call `name`. Raises XclbinError where it
        is no xclbin, is cut short, or its sections lie outside of it.
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
        """Read a file; XclbinError where it cannot be read, and as `unpack` does."""
        try:
            content = read_plain(path, _MOST_BYTES)
        except OSError as error:
            raise XclbinError(f"cannot read {path}: {reason_of(error)}") from error
        return cls.unpack(content, str(path))


# --- The kernel spec of an xclbin ---

FORMAT = "hillinfer-kernels-1"
# Shell, its version, release date and edition of the platform for development.
_PLATFORM = re.compile(r"(.+)_(\d+)_(\d{6})_\d+")
_CHOICES: dict[str, type[StrEnum]] = {
    "key_mode": KeyMode,
    "rule": Rule,
    "product_style": ProductStyle,
}


def spec_record(spec: KernelSpec, sections: Mapping[int, bytes]) -> bytes:
    """Return the USER_METADATA of an xclbin: JSON with the spec and the SHA-256 of the sections."""
    record = {
        "format": FORMAT,
        "spec": asdict(spec),
        "spec_hash": spec.digest().hex(),
        "sections": {str(int(kind)): _sum(content) for kind, content in sections.items()},
    }
    return json.dumps(record, indent=1, sort_keys=True).encode()


def check_xclbin(xclbin: Xclbin, spec: KernelSpec, platform: str, name: str) -> None:
    """Refuse an xclbin that does not hold the kernels of a spec for a platform.

    `spec` is what the host packs shadows and queries for; `platform` the card's shell, as the card
    or the platform for development is called; error messages call the file `name`. Raises
    XclbinError with the reason.
    """
    if shell_of(xclbin.platform) != shell_of(platform):
        raise XclbinError(
            f"{name} was built for the platform {xclbin.platform!r}, the card has {platform!r}: "
            "build it again with `make bitstream` for this card"
        )
    record = _record(xclbin, name)
    try:
        sums = {int(kind): expected for kind, expected in record["sections"].items()}
        found = record["spec_hash"]
    except (KeyError, AttributeError, ValueError, TypeError) as error:
        raise _unreadable(name) from error
    for kind, expected in sums.items():
        own = xclbin.sections.get(kind)
        if own is None or _sum(own) != expected:
            raise XclbinError(f"{name} is damaged: section {kind} is not what was built")
    if found != spec.digest().hex():
        raise XclbinError(
            f"{name} holds kernels of another spec ({_difference(record.get('spec'), spec)}): "
            "build one for this model and these settings"
        )


def shell_of(platform: str) -> str:
    """Return the name of the shell that a card has for a platform.

    An xclbin names the platform that it was built with, `..._gc_2_202110_1`; a card names its
    shell, `..._gc_base_2`.
    """
    named = _PLATFORM.fullmatch(platform)
    return f"{named[1]}_base_{named[2]}" if named else platform


def recorded_spec(xclbin: Xclbin, name: str) -> KernelSpec:
    """Return the spec that an xclbin's kernels were built from, as it says.

    Error messages call the file `name`. Raises XclbinError where it does not say so, or names none
    that there is.
    """
    fields = _record(xclbin, name).get("spec")
    if not isinstance(fields, dict):
        raise _unreadable(name)
    try:
        values: dict[str, Any] = {
            key: _CHOICES[key](value) if key in _CHOICES else value for key, value in fields.items()
        }
        return KernelSpec(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise XclbinError(f"{name}: its kernels' spec is none: {error!s:.200}") from error


def kernels_for(spec: KernelSpec, found: KernelSpec) -> KernelSpec:
    """Return a spec with what kernels may choose freely as the ones that were found have it.

    Multipliers, the size of score blocks and how many queries a pass may have change no score.
    """
    return replace(
        spec,
        product_style=found.product_style,
        block_tokens=found.block_tokens,
        queries=found.queries,
    )


def _record(xclbin: Xclbin, name: str) -> dict[str, Any]:
    content = xclbin.sections.get(SectionKind.USER_METADATA)
    if content is None:
        raise XclbinError(f"{name} does not say which kernels it holds: it has no USER_METADATA")
    try:
        record = json.loads(content)
        known = record["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(name) from error
    if known != FORMAT:
        raise XclbinError(f"{name}: its kernels are of format {known!r:.40}, this is {FORMAT!r}")
    return dict(record)


def _unreadable(name: str) -> XclbinError:
    return XclbinError(f"{name} is damaged: its USER_METADATA cannot be read")


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _difference(found: object, spec: KernelSpec) -> str:
    """Name what differs, the file's value first."""
    if not isinstance(found, dict):
        return "which is not given"
    wanted = json.loads(json.dumps(asdict(spec)))
    parts = [
        f"{key}={found.get(key)!r:.40} instead of {value!r}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    return ", ".join(parts) or "with the same values and another hash"
