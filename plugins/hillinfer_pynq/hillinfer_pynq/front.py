# SPDX-License-Identifier: Apache-2.0
"""The PYNQ front: a program that runs launches through pynq.Overlay.

It runs in an environment of its own, whose numpy is older than the host's, and so uses nothing of
this project: `python -I front.py FOLDER REPLIES`. The folder holds `settings.json`; a line on
standard input names a subfolder with one launch; an answer is a line of JSON on the descriptor
REPLIES. Standard output is left to XRT's driver, which talks there.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pynq

_BEAT_BYTES = 64
_HASH_BYTES = 8


class FrontError(RuntimeError):
    """A card or a launch that cannot be worked with; the message goes to the host."""


class Front:
    """The kernels of an xclbin on the first card.

    Parameters
    ----------
    xclbin
        Loaded onto the card.
    platforms
        What the card may be called: the platform of the xclbin, or that platform's shell, which is
        what a card names.
    spec_hash
        First bytes of every status beat, as hexadecimal digits.

    Raises
    ------
    FrontError
        Where the card's shell is another one, or PYNQ cannot use XRT's scheduler.
    """

    def __init__(self, xclbin: str, platforms: list[str], spec_hash: str) -> None:
        self.device = pynq.Device.active_device
        if self.device.name not in platforms:
            wanted = " or ".join(map(repr, platforms))
            raise FrontError(f"the card's platform is {self.device.name!r}, not {wanted}")
        # PYNQ's own start knows nothing of ap_ctrl_chain; XRT's scheduler does its handshake.
        if not self.device.has_capability("ERT"):
            place = os.environ.get("XILINX_XRT")
            raise FrontError(f"PYNQ cannot tell XRT's version: {place} has no version.json")
        self._spec_hash = spec_hash
        overlay = pynq.Overlay(xclbin, device=self.device)
        self._kernels = {
            entry["cu_name"].partition(":")[0]: getattr(overlay, name)
            for name, entry in overlay.ip_dict.items()
        }
        self._buffers: dict[tuple[str, str], list[Any]] = {}

    def launch(self, folder: Path) -> None:
        """Run the launch that a folder describes and leave its results there.

        `launch.json` names the kernel, its pointer arguments (uint8 arrays of shape (beats, 64) in
        `in/NAME.npy`), its scalar arguments, the arguments to read back (into `out/NAME.npy`) and
        the seconds in which it must end.

        Raises
        ------
        FrontError
            Where the kernel does not end in time, or was built for another spec.
        TypeError
            Where the arguments are not those of the kernel.
        """
        request = json.loads((folder / "launch.json").read_text())
        kernel = self._kernels.get(request["kernel"])
        if kernel is None:
            raise FrontError(f"the xclbin has no kernel {request['kernel']!r}")
        placed = {
            name: self._place(kernel, request["kernel"], name, folder / "in" / f"{name}.npy")
            for name in request["pointers"]
        }
        handle = kernel.start(**placed, **request["scalars"])
        with _deadline(request["seconds"], request["kernel"]):
            handle.wait()
        for name in request["results"]:
            placed[name].sync_from_device()
            np.save(folder / "out" / f"{name}.npy", np.array(placed[name]), allow_pickle=False)
        if request["scalars"]["segment_count"]:
            found = placed["status"][0, :_HASH_BYTES].tobytes().hex()
            if found != self._spec_hash:
                raise FrontError(f"kernels of another spec: hash {found}, not {self._spec_hash}")

    def _place(self, kernel: Any, kernel_name: str, name: str, file: Path) -> Any:
        """Return a buffer of the card's memory with the content of a file."""
        content = np.load(file, allow_pickle=False)
        if content.dtype != np.uint8 or content.ndim != 2 or content.shape[1] != _BEAT_BYTES:
            raise FrontError(f"{name} of {content.dtype} {content.shape}, not uint8 (beats, 64)")
        held = self._buffers.setdefault((kernel_name, name), [])
        if not held or held[-1].shape[0] < content.shape[0]:
            # Outgrown buffers are held, too: PYNQ unmaps what hw_emu has taken from the heap.
            beats = 1 << max(0, content.shape[0] - 1).bit_length()
            memory = self.device.get_memory_by_name(kernel.args[name].mem)
            held.append(pynq.allocate((beats, _BEAT_BYTES), dtype=np.uint8, target=memory))
        part = held[-1][: content.shape[0]]
        part[:] = content
        if content.size:
            part.sync_to_device()
        return part


@contextmanager
def _deadline(seconds: float, kernel: str) -> Iterator[None]:
    """Raise FrontError in a block that lasts too long; PYNQ's own wait has no limit."""

    def end(number: int, frame: FrameType | None) -> None:
        raise FrontError(f"{kernel} has not ended after {seconds:g} s")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Serve launches until standard input ends."""
    folder, replies = Path(sys.argv[1]), int(sys.argv[2])
    os.umask(0o077)
    # The process that plays the card must not hold it open when this one has ended.
    fcntl.fcntl(replies, fcntl.F_SETFD, fcntl.FD_CLOEXEC)

    def answer(**fields: str) -> None:
        os.write(replies, (json.dumps(fields) + "\n").encode())

    try:
        front = Front(**json.loads((folder / "settings.json").read_text()))
        answer(ready=pynq.__version__)
        for line in sys.stdin:
            front.launch(folder / line.strip())
            answer(done=line.strip())
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        # Freeing buffers of a card in an unknown state may hang.
        os._exit(1)
    front.device.close()
    os._exit(0)


if __name__ == "__main__":
    main()
