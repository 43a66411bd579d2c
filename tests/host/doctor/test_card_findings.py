# SPDX-License-Identifier: Apache-2.0
"""What doctor says about XRT and cards: verdict, facts, and a fix where something is wrong."""

from dataclasses import replace

import pytest

from hillinfer.doctor.cards import (
    CardFacts,
    P2PState,
    PeerToPeer,
    Translation,
    card_findings,
    library_finding,
)
from hillinfer.doctor.finding import Finding, Verdict

GIB = 1 << 30
GOOD = CardFacts(
    address="0000:17:00.1",
    driver="xocl",
    driver_version="2.13.466",
    shell="xilinx_u2_gen3x4_xdma_gc_2_202110_1",
    ready=True,
    peer_to_peer=PeerToPeer(P2PState.ENABLED, 4 * GIB),
    largest_bar_bytes=4 * GIB,
    translation=Translation.NONE,
)
NAME = "card 0000:17:00.1"


def rows(**changes):
    found = list(card_findings([replace(GOOD, **changes)]))
    assert [finding.name for finding in found] == [NAME, f"{NAME} P2P", f"{NAME} IOMMU"]
    return found


def test_xrt_is_there_or_optional():
    there = "2.13.466 in /opt/xilinx/xrt/lib"
    assert library_finding(there) == Finding("XRT", Verdict.OK, there)
    missing = library_finding(None)
    assert missing.verdict is Verdict.OPTIONAL
    assert "setup.sh" in missing.fix
    assert "make hw_emu" in missing.fix


def test_no_card_is_no_fault():
    assert list(card_findings([])) == [Finding("card", Verdict.OPTIONAL, "none on the PCI bus")]


def test_a_card_that_is_as_it_should_be():
    assert rows() == [
        Finding(
            NAME,
            Verdict.OK,
            "shell xilinx_u2_gen3x4_xdma_gc_2_202110_1, driver xocl 2.13.466",
        ),
        Finding(f"{NAME} P2P", Verdict.OK, "enabled, largest BAR 4.0 GiB"),
        Finding(f"{NAME} IOMMU", Verdict.OK, "none in between"),
    ]


def test_every_card_has_its_rows():
    names = [one.name for one in card_findings([GOOD, replace(GOOD, address="0000:65:00.1")])]
    assert len(names) == len(set(names)) == 6


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"driver": None, "driver_version": None}, "no driver", "xocl"),
        ({"driver": "vfio-pci", "driver_version": None}, "driver vfio-pci", "xocl"),
        ({"shell": None}, "no shell, driver xocl 2.13.466", "xbmgmt program --base"),
        ({"ready": False}, "not ready", "xclmgmt"),
    ],
)
def test_a_card_that_programs_cannot_use(changes, found, fix):
    first = rows(**changes)[0]
    assert first.verdict is Verdict.WARNING
    assert found in first.found
    assert fix in first.fix


@pytest.mark.parametrize(
    ("state", "needed", "found", "fixes"),
    [
        (
            P2PState.DISABLED,
            4 * GIB,
            "disabled, largest BAR 256.0 MiB, 4.0 GiB needed",
            ["xbutil configure --device 0000:17:00.1 --p2p enable", "Above 4G Decoding"],
        ),
        (
            P2PState.REBOOT,
            4 * GIB,
            "enabled after a warm reboot, largest BAR 256.0 MiB, 4.0 GiB needed",
            ["reboot without cutting the power", "Above 4G Decoding"],
        ),
        (
            P2PState.WRONG,
            4 * GIB,
            "remapped wrongly, largest BAR 256.0 MiB, 4.0 GiB needed",
            ["--device 0000:17:00.1 --p2p disable"],
        ),
        (
            P2PState.UNSUPPORTED,
            None,
            "not supported by the shell, largest BAR 256.0 MiB",
            ["flash a shell with P2P"],
        ),
        (
            P2PState.UNKNOWN,
            None,
            "unknown without XRT's driver, largest BAR 256.0 MiB",
            ["load XRT's driver"],
        ),
    ],
)
def test_p2p_that_is_not_enabled(state, needed, found, fixes):
    row = rows(peer_to_peer=PeerToPeer(state, needed), largest_bar_bytes=256 << 20)[1]
    assert row.verdict is Verdict.WARNING
    assert row.found == found
    for fix in fixes:
        assert fix in row.fix


@pytest.mark.parametrize(
    ("translation", "verdict"),
    [
        (Translation.NONE, Verdict.OK),
        (Translation.PASSED, Verdict.OK),
        (Translation.TRANSLATED, Verdict.WARNING),
        (Translation.UNKNOWN, Verdict.WARNING),
    ],
)
def test_iommu(translation, verdict):
    row = rows(translation=translation)[2]
    assert (row.verdict, row.found) == (verdict, str(translation))
    if verdict is Verdict.OK:
        assert row.fix is None
    else:
        assert "iommu=pt" in row.fix
