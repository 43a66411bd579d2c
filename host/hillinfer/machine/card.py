# SPDX-License-Identifier: Apache-2.0
"""Cards as Linux and XRT's driver show them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hillinfer.machine.peer_to_peer import P2PState, PeerToPeer
from hillinfer.machine.translation import Translation

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
