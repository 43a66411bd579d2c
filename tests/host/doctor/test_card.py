# SPDX-License-Identifier: Apache-2.0
"""Cards are found in trees like those that Linux and XRT's drivers show."""

import pytest

from hillinfer.doctor.cards import P2PState, PeerToPeer, Translation, find_cards

GIB = 1 << 30
SMALL = 256 << 20
SHELL = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"
MEMORY, PREFETCHED, PORTS = 0x40200, 0x14220C, 0x40101


class Machine:
    """A tree of PCI devices."""

    def __init__(self, root):
        self.root = root
        self.devices = root / "devices"
        self.devices.mkdir()

    def device(self, address, vendor="0x10ee", driver=None, bars=((MEMORY, 1 << 20),), group=None):
        folder = self.devices / address
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "resource").write_text(resource(bars))
        if driver is not None:
            (folder / "driver").symlink_to(self.driver(driver))
        if group is not None:
            (folder / "iommu_group").symlink_to(self.group(group))
        return folder

    def user(self, address="0000:17:00.1", p2p=None, ready="0x1", **given):
        """A function as XRT's driver xocl shows it."""
        folder = self.device(address, driver="xocl", **given)
        (folder / "ready").write_text(f"{ready}\n")
        rom = folder / "rom.u.26624"
        rom.mkdir()
        (rom / "VBNV").write_text(f"{SHELL}\n")
        if p2p is not None:
            part = folder / "p2p.u.26624"
            part.mkdir()
            (part / "config").write_text("".join(f"{n}:{size}\n" for n, size in p2p.items()))
        return folder

    def management(self, address="0000:17:00.0"):
        folder = self.device(address, driver="xclmgmt")
        rom = folder / "rom.m.26624"
        rom.mkdir()
        (rom / "VBNV").write_text(f"{SHELL}\n")
        return folder

    def driver(self, name):
        folder = self.root / "drivers" / name
        module = folder / "module"
        if not folder.exists():
            module.mkdir(parents=True)
            if name == "xocl":
                (module / "version").write_text(
                    "2.13.466,f5505e402c2ca1ffe45eb6d3a9399b23a0dc8776\n"
                )
        return folder

    def group(self, kind):
        folder = self.root / "groups" / (kind or "untold")
        if not folder.exists():
            folder.mkdir(parents=True)
            if kind:
                (folder / "type").write_text(f"{kind}\n")
        return folder

    def only(self):
        (card,) = find_cards(self.devices)
        return card

    def addresses(self):
        return [card.address for card in find_cards(self.devices)]


def resource(bars, more=()):
    """Lines of first, last and flags: six BARs, the ROM, then windows behind the function."""
    lines, first = [], 0x380000000000
    for flags, size in [*bars, *[(0, 0)] * (6 - len(bars)), (0, 0), *more]:
        last = first + size - 1 if size else 0
        lines.append(f"0x{first if size else 0:016x} 0x{last:016x} 0x{flags:016x}")
        first += size
    return "\n".join(lines) + "\n"


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_machine_without_pci_has_no_card(tmp_path):
    assert find_cards(tmp_path / "none") == []


def test_a_machine_without_a_card_has_none(machine):
    machine.device("0000:00:1f.2", vendor="0x8086", driver="ahci")
    machine.device("0000:05:00.0", vendor="0x144d", driver="nvme")
    assert machine.addresses() == []


def test_a_card_that_is_as_it_should_be(machine):
    machine.management()
    whole = 4 * GIB
    machine.user(
        p2p={"bar": whole, "max_bar": whole, "exp_bar": whole, "rbar": whole, "remap": whole},
        bars=[(MEMORY, 32 << 20), (0, 0), (PREFETCHED, whole)],
        group="identity",
    )
    card = machine.only()
    assert card.address == "0000:17:00.1"
    assert (card.driver, card.driver_version) == ("xocl", "2.13.466")
    assert card.shell == SHELL
    assert card.ready
    assert card.peer_to_peer == PeerToPeer(P2PState.ENABLED, whole)
    assert card.largest_bar_bytes == whole
    assert card.translation is Translation.PASSED


@pytest.mark.parametrize(
    ("p2p", "state"),
    [
        ({"bar": SMALL, "exp_bar": 4 * GIB, "rbar": SMALL}, P2PState.DISABLED),
        ({"bar": SMALL, "exp_bar": 4 * GIB, "rbar": 4 * GIB}, P2PState.REBOOT),
        ({"bar": 4 * GIB, "exp_bar": 4 * GIB, "remap": GIB}, P2PState.WRONG),
        ({"max_bar": 0, "exp_bar": 1}, P2PState.UNSUPPORTED),
        (None, P2PState.UNSUPPORTED),
    ],
)
def test_what_the_driver_says_of_p2p(machine, p2p, state):
    machine.user(p2p=p2p)
    assert machine.only().peer_to_peer.state is state


def test_a_part_of_p2p_without_a_node_is_no_p2p(machine):
    """So the driver shows a shell whose description names no window for it."""
    (machine.user() / "p2p.u.26624").mkdir()
    assert machine.only().peer_to_peer == PeerToPeer(P2PState.UNSUPPORTED)


@pytest.mark.parametrize("text", ["0x0", "", "no"])
def test_a_card_that_is_not_ready(machine, text):
    machine.user(ready=text)
    assert not machine.only().ready


def test_a_card_without_a_shell(machine):
    folder = machine.user()
    (folder / "rom.u.26624" / "VBNV").unlink()
    assert machine.only().shell is None


def test_management_functions_are_no_cards(machine):
    machine.management()
    assert machine.addresses() == []
    machine.device("0000:17:00.1")
    assert machine.addresses() == ["0000:17:00.1"]


def test_without_any_driver_a_card_is_one_still(machine):
    machine.device("0000:17:00.0")
    machine.device("0000:17:00.1")
    card = machine.only()
    assert card.address == "0000:17:00.1"
    assert card.driver is card.driver_version is card.shell is None
    assert not card.ready
    assert card.peer_to_peer == PeerToPeer(P2PState.UNKNOWN)


def test_a_card_with_another_driver(machine):
    machine.device("0000:17:00.0", driver="vfio-pci")
    card = machine.only()
    assert (card.driver, card.driver_version) == ("vfio-pci", None)
    assert card.peer_to_peer == PeerToPeer(P2PState.UNKNOWN)


def test_two_cards_and_one_of_another_maker(machine):
    """XRT's driver takes cards that others build and sell with their own vendor number."""
    machine.management("0000:17:00.0")
    machine.user("0000:17:00.1")
    machine.user("0000:65:00.0", vendor="0x13fe")
    machine.device("0000:65:00.1", vendor="0x13fe")
    machine.management("0000:b3:00.0")
    machine.user("0000:b3:00.1")
    assert machine.addresses() == ["0000:17:00.1", "0000:65:00.0", "0000:b3:00.1"]


@pytest.mark.parametrize(
    ("group", "translation"),
    [
        (None, Translation.NONE),
        ("identity", Translation.PASSED),
        ("DMA", Translation.TRANSLATED),
        ("DMA-FQ", Translation.TRANSLATED),
        ("unmanaged", Translation.UNKNOWN),
        ("", Translation.UNKNOWN),
    ],
)
def test_iommu(machine, group, translation):
    machine.user(group=group)
    assert machine.only().translation is translation


@pytest.mark.parametrize(
    ("bars", "largest"),
    [
        ([], 0),
        ([(MEMORY, 32 << 20), (PREFETCHED, 4 * GIB), (MEMORY, 1 << 16)], 4 * GIB),
        ([(PREFETCHED, SMALL)], SMALL),
        ([(PORTS, 128 << 20), (MEMORY, 1 << 20)], 1 << 20),
    ],
)
def test_largest_bar(machine, bars, largest):
    machine.user(bars=bars)
    assert machine.only().largest_bar_bytes == largest


def test_windows_behind_a_function_are_no_bars(machine):
    text = resource([(MEMORY, 1 << 20)], more=[(PREFETCHED, 64 * GIB)])
    (machine.user() / "resource").write_text(text)
    assert machine.only().largest_bar_bytes == 1 << 20


def test_a_bar_that_found_no_room_on_the_bus_is_none(machine):
    text = resource([(MEMORY, 1 << 20)]).splitlines()
    text[2] = f"0x{0:016x} 0x{4 * GIB - 1:016x} 0x{PREFETCHED:016x}"
    (machine.user() / "resource").write_text("\n".join(text) + "\n")
    assert machine.only().largest_bar_bytes == 1 << 20
