# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor` says about XRT, cards and an xclbin."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from hillinfer.byte_size import format_bytes
from hillinfer.cold_dir import prepared_cold_dir
from hillinfer.devices.xrt.environment import environment_of
from hillinfer.devices.xrt.errors import XclbinError
from hillinfer.devices.xrt.spec_record import check_xclbin, recorded_spec
from hillinfer.devices.xrt.worker_process import WorkerProcess
from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin
from hillinfer.errors import HillInferError
from hillinfer.machine.card import CardFacts, PeerToPeer, find_cards
from hillinfer.machine.finding import Finding, Verdict
from hillinfer.machine.xrt_library import find_xrt_library
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.cold_file import ColdFile, probe_io_mode

CURVE_BLOCKS = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
_CURVE_BYTES = 64 << 20
_SECONDS = 60.0


def card_findings(xclbin: Path | None, cold_dir: Path | None) -> Iterator[Finding]:
    """Look at XRT and cards, and at an xclbin where one is named.

    Parameters
    ----------
    xclbin
        Image to check; its card is opened and read into.
    cold_dir
        Directory on the drive whose reads are timed; None for the default one.
    """
    library = find_xrt_library()
    if library is None:
        fix = "install AMD XRT and source its setup.sh; on Debian apt install libxrt1"
        yield Finding("XRT", Verdict.OPTIONAL, "needed for a card", fix)
    else:
        yield Finding("XRT", Verdict.OK, library)
    cards = find_cards()
    if not cards:
        yield Finding("card", Verdict.OPTIONAL, "none on the PCI bus")
    for card in cards:
        yield from _card(card)
    if xclbin is not None:
        yield from _image(xclbin, cold_dir)


def _card(card: CardFacts) -> Iterator[Finding]:
    name = f"card {card.address}"
    if card.shell is None:
        fix = "load XRT's driver xocl, and flash the card's shell"
        yield Finding(name, Verdict.WARNING, "no driver", fix)
    else:
        yield Finding(name, Verdict.OK, f"shell {card.shell}")
    bar = f"largest BAR {format_bytes(card.largest_bar_bytes)}"
    if card.peer_to_peer is PeerToPeer.ENABLED:
        yield Finding(f"{name} P2P", Verdict.OK, f"enabled, {bar}")
    else:
        fix = (
            f"xbutil configure -d {card.address} --p2p enable, with large BARs allowed in the "
            "firmware (above 4G decoding), then a warm reboot"
        )
        yield Finding(f"{name} P2P", Verdict.WARNING, f"{card.peer_to_peer}, {bar}", fix)
    if card.behind_iommu:
        yield Finding(
            f"{name} IOMMU", Verdict.WARNING, "addresses are translated",
            "drives may not reach the card's memory: boot with iommu=pt, or without an IOMMU",
        )  # fmt: skip
    else:
        yield Finding(f"{name} IOMMU", Verdict.OK, "none in between")


def _image(path: Path, cold_dir: Path | None) -> Iterator[Finding]:
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
    try:
        yield from _opened(path, xclbin, prepared_cold_dir(cold_dir))
    except HillInferError as error:
        yield Finding("xclbin on its card", Verdict.WARNING, "unusable", str(error))


def _opened(path: Path, xclbin: Xclbin, cold_dir: Path) -> Iterator[Finding]:
    """Load the image and time reads from the drive into the card's memory."""
    worker = WorkerProcess(environment_of(path), 1 << 20, _SECONDS)
    try:
        card = worker.ask("open", 2 * _SECONDS, xclbin=str(path.resolve()), index=0)
        emulated = " (emulated)" if xclbin.mode == HW_EMU else ""
        memory = format_bytes(int(card["memory_bytes"]))
        yield Finding("xclbin on its card", Verdict.OK, f"{card['name']}{emulated}, {memory}")
        points = ", ".join(
            f"{format_bytes(block)} {rate / 1e9:.2f} GB/s"
            for block, rate in _curve(worker, cold_dir)
        )
        label = "not a card's: host memory" if emulated else "measured now"
        yield Finding("P2P read curve", Verdict.OK, f"{points} ({label})")
    finally:
        worker.close()


def _curve(worker: WorkerProcess, cold_dir: Path) -> Iterator[tuple[int, float]]:
    """Yield bytes per read, and bytes per second with a few reads at once."""
    worker.ask("chunk", _SECONDS, size=_CURVE_BYTES)
    file = ColdFile(cold_dir, probe_io_mode(cold_dir), "a file to time")
    try:
        piece = aligned_buffer(1 << 20)
        for start in range(0, _CURVE_BYTES, piece.nbytes):
            file.write(piece.data, start)
        for block in CURVE_BLOCKS:
            # Small reads are slow, and a few of them tell as much.
            size = min(_CURVE_BYTES, block * 256)
            began = time.perf_counter()
            worker.ask(
                "load", _SECONDS, [file.descriptor],
                chunk=0, offset=0, file_offset=0, size=size, block=block,
            )  # fmt: skip
            yield block, size / (time.perf_counter() - began)
    finally:
        file.close()
