# SPDX-License-Identifier: Apache-2.0
"""Cards as Linux, XRT's driver and a run see them, and what `hillinfer doctor` says of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

import numpy as np

from hillinfer.devices.xrt.process import Deadlines, WorkerProcess, deadlines_of, environment_of
from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin, XclbinError, check_xclbin, recorded_spec
from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import prepared_cold_dir
from hillinfer.drive.files import ColdFile, IOMode, aligned_buffer, probe_io_mode
from hillinfer.errors import DeviceError, HillInferError
from hillinfer.values import format_bytes
from hillinfer_model.kernel_spec import KernelSpec

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

    `state` is as `xbutil examine --report platform` has it under `P2P Status`; `needed_bytes` is
    the size of the window on the bus that shows the card's memory, None where nobody says it.
    """

    state: P2PState
    needed_bytes: int | None = None

    @classmethod
    def of_config(cls, config: str) -> PeerToPeer:
        """Read what the driver's `config` node says, in XRT's own order.

        Lines are `name:bytes`: `bar`, the window as it is; `exp_bar`, as it must be; `rbar`, as the
        card asks for it at the next boot; `remap`, what of it leads to memory. A shell without P2P
        has no `bar`, and one without XRT's driver no text.
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
        """Read a group's file `type`, of which there is nothing before Linux 5.11."""
        if kind == "identity":
            return cls.PASSED
        return cls.TRANSLATED if kind in ("DMA", "DMA-FQ") else cls.UNKNOWN


# --- The XRT library ---

_FOLDERS = ("/opt/xilinx/xrt/lib", "/usr/lib/*-linux-gnu", "/usr/lib64")
_LIBRARY = "libxrt_coreutil.so.2"


def find_xrt_library(prefix: str | None = None, folders: tuple[str, ...] = _FOLDERS) -> str | None:
    """Return where XRT is and its version, or None where it is not.

    `prefix` is where its setup.sh points to, `XILINX_XRT` where None; `folders` are patterns of
    places to look at besides.
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

    `address` is its place on the bus, like 0000:17:00.1. Of its driver, name and version are None
    where there is none. `shell` is the name of its platform, versions included, None where XRT's
    driver knows none, and `ready` whether that driver lets programs have it. `peer_to_peer` says
    whether a drive can reach its memory, `largest_bar_bytes` how large a window the bus has into
    it, and `translation` what an IOMMU does with its addresses.
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
    """Return the cards of this machine, from where Linux shows PCI devices."""
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
    """Say whether XRT is there, as `find_xrt_library` found it."""
    if library is not None:
        return Finding("XRT", Verdict.OK, library)
    fix = (
        "for a card install AMD XRT and source its setup.sh; `make hw_emu` in a source tree "
        "installs what an emulated one needs"
    )
    return Finding("XRT", Verdict.OPTIONAL, "needed for the xrt device", fix)


def card_findings(cards: Sequence[CardFacts]) -> Iterator[Finding]:
    """Say what stands between this machine's programs, its drives and its cards."""
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


# --- P2P reads by their size ---

BLOCKS = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
# Small reads are slow, and a few of them tell as much.
_READS = 256
_LARGEST_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


def read_curve(
    worker: WorkerProcess, file: ColdFile, seconds: float
) -> Iterator[tuple[int, float]]:
    """Yield bytes per read and bytes per second of a few at once, as launches have them.

    Before the first it looks at whether the bytes arrive. The worker has an opened card and a
    window of at least 1 MiB; each of its answers must come within `seconds`. The file is an empty
    one and is written first. Raises DeviceError where the card has no memory for it, fails, or
    holds other bytes than the file, and ColdPoolError where the drive fails.
    """
    answer = worker.ask("chunk", seconds, size=_LARGEST_BYTES)
    if "full" in answer:
        raise DeviceError(f"the card gives no memory that a drive can reach: {answer['full']}")
    # Drives may be faster with zeros.
    piece = aligned_buffer(_PIECE_BYTES)
    piece[:] = np.random.default_rng(0).integers(0, 256, piece.nbytes, np.uint8)
    for number in range(_LARGEST_BYTES // piece.nbytes):
        # Each piece is another, so that one in the place of another shows.
        piece[0] = number
        file.write(piece.data, number * piece.nbytes)
    _load(worker, file, seconds, _LARGEST_BYTES, _PIECE_BYTES)
    # Reading a card's memory over the bus is slow, so only the last piece is looked at.
    start = _LARGEST_BYTES - piece.nbytes
    worker.ask("read", seconds, chunk=0, offset=start, at=0, size=piece.nbytes)
    if not np.array_equal(worker.window[: piece.nbytes], piece):
        raise DeviceError("the card's memory does not hold what was read from the drive")
    for block in BLOCKS:
        size = min(_LARGEST_BYTES, block * _READS)
        began = time.perf_counter()
        _load(worker, file, seconds, size, block)
        yield block, size / (time.perf_counter() - began)


def _load(worker: WorkerProcess, file: ColdFile, seconds: float, size: int, block: int) -> None:
    worker.ask(
        "load", seconds, [file.descriptor],
        parts=[[0, 0, 0, 0, size]], block=block,
    )  # fmt: skip


# --- An image on its card ---

_WINDOW_BYTES = 1 << 20
Starter = Callable[[Mapping[str, str], int, float], WorkerProcess]


def xclbin_findings(
    path: Path,
    cold_dir: Path | None,
    deadlines: Deadlines | None = None,
    calls: DriveCalls | None = None,
    start: Starter = WorkerProcess,
) -> Iterator[Finding]:
    """Check an image, load it on its card, and time reads from the drive into the card's memory.

    `path` is the image's. None stands for the default directory, for what a run waits, and for the
    operating system itself to reach the drive; `start` starts the process that has the card.
    """
    try:
        xclbin = Xclbin.read(path)
        spec = recorded_spec(xclbin, str(path))
        check_xclbin(xclbin, spec, xclbin.platform, str(path))
    except XclbinError as error:
        yield Finding("xclbin", Verdict.WARNING, "unusable", str(error))
        return
    yield Finding(
        "xclbin", Verdict.OK,
        f"{spec.key_mode} {spec.rule}, heads of {spec.head_dim}, {spec.kv_heads} KV heads, "
        f"{spec.group_size} query heads each, for {xclbin.platform}; sections and spec hash "
        f"{spec.digest().hex()[:16]} as built",
    )  # fmt: skip
    yield from _tried(path, xclbin, spec, cold_dir, deadlines, calls or DriveCalls(), start)


def _tried(
    path: Path,
    xclbin: Xclbin,
    spec: KernelSpec,
    cold_dir: Path | None,
    deadlines: Deadlines | None,
    calls: DriveCalls,
    start: Starter,
) -> list[Finding]:
    """Open the card; no process of it is left when this returns."""
    name = "xclbin on its card"
    try:
        environment = environment_of(path)
        wait = deadlines or deadlines_of(xclbin, {**os.environ, **environment})
        worker = start(environment, _WINDOW_BYTES, wait.load)
        with closing(worker):
            card = worker.ask("open", wait.load, xclbin=str(path.resolve()), index=0)
            check_xclbin(xclbin, spec, str(card["name"]), str(path))
            emulated = " (emulated)" if xclbin.mode == HW_EMU else f" at {card['place']}"
            memory = format_bytes(int(card["memory_bytes"]))
            opened = Finding(name, Verdict.OK, f"{card['name']}{emulated}, {memory}")
            return [opened, _curve(worker, xclbin, cold_dir, wait.answer, calls)]
    except HillInferError as error:
        return [Finding(name, Verdict.WARNING, "unusable", str(error))]


def _curve(
    worker: WorkerProcess, xclbin: Xclbin, cold_dir: Path | None, seconds: float, calls: DriveCalls
) -> Finding:
    name = "P2P read curve"
    try:
        folder = prepared_cold_dir(cold_dir)
        mode = probe_io_mode(folder, calls)
        with closing(ColdFile(folder, mode, "a file to time", calls)) as file:
            points = [
                f"{format_bytes(block)} {rate / 1e9:.2f} GB/s"
                for block, rate in read_curve(worker, file, seconds)
            ]
    except HillInferError as error:
        return Finding(name, Verdict.WARNING, "not measured", str(error))
    found = ", ".join(points)
    if xclbin.mode == HW_EMU:
        return Finding(name, Verdict.OK, f"{found} (not a card's: into this machine's memory)")
    if mode is IOMode.BUFFERED:
        fix = f"{folder} does not allow direct I/O: choose another directory with --cold-dir"
        return Finding(name, Verdict.WARNING, f"{found} (through the page cache, no P2P)", fix)
    return Finding(
        name, Verdict.OK,
        f"{found} from {folder} straight into the card's memory, measured now; a run measures "
        "its own reads and goes on with the best size",
    )  # fmt: skip
