# SPDX-License-Identifier: Apache-2.0
"""Cards that XRT's driver or PCI knows, and what peer-to-peer transfers need of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
_XILINX = "0x10ee"


class PeerToPeer(StrEnum):
    """Whether a drive can reach a card's memory."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    REBOOT = "enabled after a warm reboot"
    WRONG = "remapped wrongly"
    UNKNOWN = "unknown: XRT's driver says nothing about it"


@dataclass(frozen=True)
class CardFacts:
    """One card.

    Parameters
    ----------
    address
        Its place on the bus, like 0000:17:00.1.
    shell
        Name and version of its platform; None without XRT's driver.
    peer_to_peer
        As the driver says.
    largest_bar_bytes
        Size of the largest window that the bus has into it.
    behind_iommu
        Whether addresses on the bus are translated.
    """

    address: str
    shell: str | None
    peer_to_peer: PeerToPeer
    largest_bar_bytes: int
    behind_iommu: bool


def find_cards(devices: Path = PCI_DEVICES) -> list[CardFacts]:
    """Return the cards of this machine, those functions of them that programs can use.

    Parameters
    ----------
    devices
        Where Linux shows PCI devices.
    """
    if not devices.is_dir():
        return []
    found = []
    for device in sorted(devices.iterdir()):
        if _text(device / "vendor") != _XILINX:
            continue
        # The management function has a driver, too, and no part that programs use.
        user_parts = list(device.glob("rom.u.*"))
        if not user_parts and (device / "driver").exists() and _driver(device) != "xocl":
            continue
        shell = _text(user_parts[0] / "VBNV") if user_parts else None
        found.append(
            CardFacts(
                device.name,
                shell or None,
                _peer_to_peer(device),
                _largest_bar(device),
                (device / "iommu_group").exists(),
            )
        )
    return found


def _driver(device: Path) -> str:
    return (device / "driver").resolve().name


def _peer_to_peer(device: Path) -> PeerToPeer:
    """Read the driver's lines `bar:`, `exp_bar:`, `rbar:` and `remap:`, sizes in GiB or bytes."""
    configs = [_text(part / "config") for part in device.glob("p2p.u.*")]
    values = {}
    for line in configs[0].splitlines() if configs else []:
        name, _, value = line.partition(":")
        if value.strip().isdigit():
            values[name.strip()] = int(value)
    own = values.get("bar")
    if own is None:
        return PeerToPeer.UNKNOWN
    if values.get("rbar", 0) > own:
        return PeerToPeer.REBOOT
    if values.get("remap", 0) not in (0, own):
        return PeerToPeer.WRONG
    return PeerToPeer.ENABLED if values.get("exp_bar") == own else PeerToPeer.DISABLED


def _largest_bar(device: Path) -> int:
    sizes = [0]
    for line in _text(device / "resource").splitlines():
        parts = line.split()
        if len(parts) == 3:
            first, last = int(parts[0], 16), int(parts[1], 16)
            sizes.append(last - first + 1 if last > first else 0)
    return max(sizes)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
