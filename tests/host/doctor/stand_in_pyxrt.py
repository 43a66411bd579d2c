# SPDX-License-Identifier: Apache-2.0
"""A module pyxrt for a worker: a card of mere memory, with one fault that FAULT names.

A worker imports it from a folder where it is called pyxrt.py; it leaves its process and folder in
the file that TOLD names.
"""

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

FAULT = os.environ.get("FAULT", "")
Path(os.environ["TOLD"]).write_text(f"{os.getpid()} {Path.cwd()}")

if FAULT == "no library":
    raise ImportError("libxrt_coreutil.so.2: cannot open shared object file")
if FAULT == "lost writes":
    # Transfers that end well and leave nothing, as those to a wrong address may.
    os.preadv = lambda file, parts, offset: len(parts[0])

xrt_info_device = SimpleNamespace(name="name", bdf="bdf")


class device:  # noqa: N801 - as XRT calls it
    def __init__(self, index):
        if FAULT == "no device":
            raise RuntimeError(f"Could not open device with index '{index}'")

    def load_xclbin(self, path):
        if FAULT == "dies":
            os._exit(1)

    def get_info(self, what):
        return os.environ["SHELL_NAME"] if what == "name" else "0000:17:00.1"


class kernel:  # noqa: N801
    def __init__(self, device, loaded, name):
        pass

    def group_id(self, index):
        return 0


class xclbin:  # noqa: N801
    def __init__(self, path):
        pass

    def get_mems(self):
        return [SimpleNamespace(get_index=lambda: 0, get_size_kb=lambda: 4 << 20)]


class bo:  # noqa: N801
    p2p = "p2p"

    def __init__(self, device, size, flags, group):
        assert flags == bo.p2p
        if FAULT == "no p2p":
            raise RuntimeError("failed to allocate a P2P buffer: Operation not permitted")
        self._memory = mmap.mmap(-1, size)

    def map(self):
        return self._memory

    def address(self):
        return 0
