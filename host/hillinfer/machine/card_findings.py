# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor` says about XRT and cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hillinfer.byte_size import format_bytes
from hillinfer.machine.card import XRT_DRIVER, CardFacts
from hillinfer.machine.finding import Finding, Verdict
from hillinfer.machine.peer_to_peer import P2PState
from hillinfer.machine.translation import Translation

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
