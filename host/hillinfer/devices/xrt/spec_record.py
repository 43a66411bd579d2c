# SPDX-License-Identifier: Apache-2.0
"""What an xclbin says about the kernels in it: their spec, and a sum of every section."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from hillinfer.devices.xrt.errors import XclbinError
from hillinfer.devices.xrt.section_kind import SectionKind
from hillinfer.devices.xrt.xclbin import Xclbin
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle

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

    Parameters
    ----------
    xclbin
        As read from its file.
    spec
        What the host packs shadows and queries for.
    platform
        The card's shell, as the card or the platform for development is called.
    name
        What error messages call the file.

    Raises
    ------
    XclbinError
        With the reason.
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

    Parameters
    ----------
    xclbin
        As read from its file.
    name
        What error messages call the file.

    Raises
    ------
    XclbinError
        Where it does not say so, or names none that there is.
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
