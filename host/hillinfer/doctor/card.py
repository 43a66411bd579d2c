# SPDX-License-Identifier: Apache-2.0
"""Cards as Linux and XRT's driver show them, and what `hillinfer doctor` says about them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.values import format_bytes

# --- Peer-to-peer transfers ---


class P2PState(StrEnum):
    """Whether a drive can reach a card's memory."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    REBOOT = "enabled after a warm reboot"
    WRONG = "remapped wrongly"
    UNSUPPORTED = "not supported by the shell"
    UNKNOWN = "unknown without XRT's driver"


@dataclass(frozen=True)
class PeerToPeer:
    """Whether a drive can reach a card's memory, and what that takes.

    Parameters
    ----------
    state
        As `xbutil examine --report platform` has it under `P2P Status`.
    needed_bytes
        Size of the window on the bus that shows the card's memory; None where nobody says it.
    """

    state: P2PState
    needed_bytes: int | None = None

    @classmethod
    def of_config(cls, config: str) -> PeerToPeer:
        """Read what the driver's `config` node says, in XRT's own order.

        Lines are `name:bytes`: `bar`, the window as it is; `exp_bar`, as it must be; `rbar`, as the
        card asks for it at the next boot; `remap`, what of it leads to memory. A shell without P2P
        has no `bar`.

        Parameters
        ----------
        config
            The node's text; nothing where there is none.
        """
        sizes = {}
        for line in config.splitlines():
            name, _, value = line.partition(":")
            # Lines of memory banks have a third part.
            if value.strip().isdecimal():
                sizes[name.strip()] = int(value)
        window, needed = sizes.get("bar"), sizes.get("exp_bar")
        if window is None:
            return cls(P2PState.UNSUPPORTED)
        if sizes.get("rbar", 0) > window:
            return cls(P2PState.REBOOT, needed)
        if sizes.get("remap", 0) not in (0, window):
            return cls(P2PState.WRONG, needed)
        return cls(P2PState.ENABLED if needed == window else P2PState.DISABLED, needed)


# --- The IOMMU ---


class Translation(StrEnum):
    """What lies between a device and the bus."""

    NONE = "none in between"
    PASSED = "passes addresses as they are"
    TRANSLATED = "translates addresses"
    UNKNOWN = "in between; this kernel does not say whether it translates"

    @classmethod
    def of_group(cls, kind: str) -> Translation:
        """Read what a group of devices behind an IOMMU has in its file `type`.

        Parameters
        ----------
        kind
            The file's text; nothing where there is none, as before Linux 5.11.
        """
        if kind == "identity":
            return cls.PASSED
        return cls.TRANSLATED if kind in ("DMA", "DMA-FQ") else cls.UNKNOWN


# --- The XRT library ---

_FOLDERS = ("/opt/xilinx/xrt/lib", "/usr/lib/*-linux-gnu", "/usr/lib64")
_LIBRARY = "libxrt_coreutil.so.2"


def find_xrt_library(prefix: str | None = None, folders: tuple[str, ...] = _FOLDERS) -> str | None:
    """Return where XRT is and its version, or None where it is not.

    Parameters
    ----------
    prefix
        Where its setup.sh points to; `XILINX_XRT` where None.
    folders
        Patterns of places to look at besides.
    """
    own = prefix if prefix is not None else os.environ.get("XILINX_XRT")
    places = [Path(own) / "lib"] if own else []
    for pattern in folders:
        places += sorted(Path("/").glob(pattern.lstrip("/")))
    for place in places:
        library = place / _LIBRARY
        if library.exists():
            return f"{_version(place, library)} in {place}"
    return None


def _version(place: Path, library: Path) -> str:
    try:
        content = json.loads((place.parent / "version.json").read_text(encoding="utf-8"))
        return str(content["BUILD_VERSION"])
    except (OSError, ValueError, KeyError, TypeError):
        return library.resolve().name.removeprefix("libxrt_coreutil.so.")


# --- Cards ---

PCI_DEVICES = Path("/sys/bus/pci/devices")
XRT_DRIVER = "xocl"
_MANAGEMENT_DRIVER = "xclmgmt"
_XILINX = "0x10ee"
# After them, `resource` lists the ROM and windows that are no BARs of this function.
_BARS = 6
_IS_MEMORY = 0x200


@dataclass(frozen=True)
class CardFacts:
    """One card: that function of it which programs use.

    Parameters
    ----------
    address
        Its place on the bus, like 0000:17:00.1.
    driver
        Name of its driver; None without one.
    driver_version
        The driver's version; None where it has none.
    shell
        Name of its platform, versions included; None where XRT's driver knows none.
    ready
        Whether XRT's driver lets programs have it.
    peer_to_peer
        Whether a drive can reach its memory.
    largest_bar_bytes
        Size of the largest window that the bus has into it.
    translation
        What an IOMMU does with its addresses.
    """

    address: str
    driver: str | None
    driver_version: str | None
    shell: str | None
    ready: bool
    peer_to_peer: PeerToPeer
    largest_bar_bytes: int
    translation: Translation


def find_cards(devices: Path = PCI_DEVICES) -> list[CardFacts]:
    """Return the cards of this machine.

    Parameters
    ----------
    devices
        Where Linux shows PCI devices.
    """
    if not devices.is_dir():
        return []
    # Functions of one card differ in what follows the dot.
    slots = groupby(sorted(devices.iterdir()), lambda device: device.name.rpartition(".")[0])
    return [_facts(device) for _, slot in slots for device in _used_by_programs(list(slot))]


def _used_by_programs(functions: list[Path]) -> Iterator[Path]:
    """Yield those functions of one PCI device that programs would use."""
    users = [one for one in functions if _driver(one) == XRT_DRIVER]
    # Without XRT's driver nothing tells functions apart, but the management function comes first.
    others = [
        one
        for one in functions
        if _text(one / "vendor") == _XILINX and _driver(one) != _MANAGEMENT_DRIVER
    ]
    yield from users or others[-1:]


def _facts(device: Path) -> CardFacts:
    driver = _driver(device)
    return CardFacts(
        address=device.name,
        driver=driver,
        # Version and hash of the sources.
        driver_version=_text(device / "driver" / "module" / "version").partition(",")[0] or None,
        shell=_part(device, "rom", "VBNV") or None,
        ready=_text(device / "ready") in ("0x1", "1"),
        peer_to_peer=(
            PeerToPeer.of_config(_part(device, "p2p", "config"))
            if driver == XRT_DRIVER
            else PeerToPeer(P2PState.UNKNOWN)
        ),
        largest_bar_bytes=_largest_bar(_text(device / "resource")),
        translation=(
            Translation.of_group(_text(device / "iommu_group" / "type"))
            if (device / "iommu_group").exists()
            else Translation.NONE
        ),
    )


def _driver(device: Path) -> str | None:
    link = device / "driver"
    return link.resolve().name if link.exists() else None


def _part(device: Path, part: str, node: str) -> str:
    """Read a node of a part of XRT's driver; its folder is like rom.u.26624."""
    folders = sorted(device.glob(f"{part}.*"))
    return _text(folders[0] / node) if folders else ""


def _largest_bar(resource: str) -> int:
    """Return the size of the largest memory window; lines hold first, last and flags."""
    sizes = [0]
    for line in resource.splitlines()[:_BARS]:
        first, last, flags = (int(number, 16) for number in line.split())
        # A window that found no room on the bus begins at 0.
        if first and flags & _IS_MEMORY:
            sizes.append(last - first + 1)
    return max(sizes)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# --- Findings ---

_P2P_FIXES = {
    P2PState.DISABLED: (
        "sudo xbutil configure --device {address} --p2p enable, with large BARs allowed in the "
        "firmware (Above 4G Decoding); a power cycle disables it again"
    ),
    P2PState.REBOOT: (
        "reboot without cutting the power; where it stays so, allow large BARs in the firmware "
        "(Above 4G Decoding)"
    ),
    P2PState.WRONG: (
        "sudo xbutil configure --device {address} --p2p disable, then the same with enable"
    ),
    P2PState.UNSUPPORTED: "flash a shell with P2P: drives cannot reach this one's memory",
    P2PState.UNKNOWN: "load XRT's driver first",
}
_IOMMU_FIXES = {
    Translation.TRANSLATED: (
        "reads from the drive go round by the processor, or fail: boot with iommu=pt (on Arm "
        "iommu.passthrough=1), or turn the IOMMU off"
    ),
    Translation.UNKNOWN: (
        "boot with iommu=pt (on Arm iommu.passthrough=1) where P2P reads are slow or fail"
    ),
}


def library_finding(library: str | None) -> Finding:
    """Say whether XRT is there.

    Parameters
    ----------
    library
        As `find_xrt_library` returns it.
    """
    if library is not None:
        return Finding("XRT", Verdict.OK, library)
    fix = (
        "for a card install AMD XRT and source its setup.sh; `make hw_emu` in a source tree "
        "installs what an emulated one needs"
    )
    return Finding("XRT", Verdict.OPTIONAL, "needed for the xrt device", fix)


def card_findings(cards: Sequence[CardFacts]) -> Iterator[Finding]:
    """Say what stands between this machine's programs, its drives and its cards.

    Parameters
    ----------
    cards
        As `find_cards` returns them.
    """
    if not cards:
        yield Finding("card", Verdict.OPTIONAL, "none on the PCI bus")
    for card in cards:
        yield _shell(card)
        yield _peer_to_peer(card)
        yield _iommu(card)


def _shell(card: CardFacts) -> Finding:
    name = f"card {card.address}"
    if card.driver is None:
        return Finding(name, Verdict.WARNING, "no driver", "load XRT's driver, modprobe xocl")
    if card.driver != XRT_DRIVER:
        fix = "bind it to XRT's driver xocl, or leave it: HillInfer cannot use it so"
        return Finding(name, Verdict.WARNING, f"driver {card.driver}", fix)
    driver = f"driver {card.driver} {card.driver_version or 'of unknown version'}"
    if card.shell is None:
        fix = "flash the card's shell: sudo xbmgmt program --base"
        return Finding(name, Verdict.WARNING, f"no shell, {driver}", fix)
    found = f"shell {card.shell}, {driver}"
    if not card.ready:
        fix = "load xclmgmt, the driver of its management function; dmesg says more"
        return Finding(name, Verdict.WARNING, f"{found}, not ready", fix)
    return Finding(name, Verdict.OK, found)


def _peer_to_peer(card: CardFacts) -> Finding:
    name, said = f"card {card.address} P2P", card.peer_to_peer
    found = f"{said.state}, largest BAR {format_bytes(card.largest_bar_bytes)}"
    if said.state is P2PState.ENABLED:
        return Finding(name, Verdict.OK, found)
    if said.needed_bytes is not None:
        found += f", {format_bytes(said.needed_bytes)} needed"
    fix = _P2P_FIXES[said.state].format(address=card.address)
    return Finding(name, Verdict.WARNING, found, fix)


def _iommu(card: CardFacts) -> Finding:
    fix = _IOMMU_FIXES.get(card.translation)
    verdict = Verdict.WARNING if fix else Verdict.OK
    return Finding(f"card {card.address} IOMMU", verdict, str(card.translation), fix)
