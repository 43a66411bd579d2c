# SPDX-License-Identifier: Apache-2.0
"""Programs that call XRT itself, each run in a process of its own: XRT may end it.

`python xrt_programs.py NAME XCLBIN FOLDER` runs one; it ends with 0 where all was as expected.
"""

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import pyxrt
from launch_cases import random_launch, random_shadow_launch

from hillinfer.devices.xrt.xclbin import Xclbin, recorded_spec
from hillinfer_model.choices import Scope
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch

TOKENS = [512, 130, 0, 300]
TO_DEVICE = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
FROM_DEVICE = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE
PAGE = 4096


class Card:
    """An opened card with its kernels."""

    def __init__(self, xclbin):
        self.spec = recorded_spec(Xclbin.read(Path(xclbin)), xclbin)
        self.device = pyxrt.device(0)
        self.uuid = self.device.load_xclbin(xclbin)
        self.score = pyxrt.kernel(self.device, self.uuid, "score_tokens")
        self.shadow = pyxrt.kernel(self.device, self.uuid, "make_shadow")

    def buffer(self, kernel, index, content, flags=pyxrt.bo.normal):
        made = pyxrt.bo(self.device, max(content.nbytes, PAGE), flags, kernel.group_id(index))
        made.write(content.tobytes(), 0)
        if flags == pyxrt.bo.normal:
            made.sync(TO_DEVICE)
        return made

    def buffers(self, kernel, parts):
        return [self.buffer(kernel, index, part) for index, part in enumerate(parts)]


def content(buffer, like):
    """What a kernel left in a buffer."""
    buffer.sync(FROM_DEVICE)
    found = np.frombuffer(buffer.read(like.nbytes, 0), np.uint8).reshape(like.shape).copy()
    # For the twins of the tests that compare.
    found.flat[0] ^= int(os.environ.get("FLIPPED_BITS", "0"))
    return found


def status_of(segments):
    return np.full((segments, 64), 0xA5, np.uint8)


def parts_of(launch):
    status = status_of(len(launch.segments))
    if hasattr(launch, "scores"):
        return [launch.segments, launch.shadow, launch.queries, launch.scores, status]
    return [launch.segments, launch.rows, launch.statistics, launch.shadow, status]


def check(buffers, launch, golden):
    for buffer, expected in zip(buffers[3:], (golden.output, golden.status), strict=True):
        np.testing.assert_array_equal(content(buffer, expected), expected)


def both_kernels(card, folder):
    """Both kernels, one after the other."""
    launch = random_launch(card.spec, Scope.KV_HEAD, TOKENS)
    made = random_shadow_launch(card.spec, TOKENS)
    for _ in range(2):
        own = card.buffers(card.score, parts_of(launch))
        card.score(*own, len(TOKENS), 1, launch.launch_id).wait()
        check(own, launch, run_score_launch(card.spec, launch))
        own = card.buffers(card.shadow, parts_of(made))
        card.shadow(*own, len(TOKENS), made.launch_id).wait()
        check(own, made, run_shadow_launch(card.spec, made))


def launches_in_flight(card, folder):
    """Four launches of two kernels are started before the first is waited for."""
    started = []
    for seed in range(2):
        launch = random_launch(card.spec, Scope.LAYER, [100 + seed, 512])
        own = card.buffers(card.score, parts_of(launch))
        run = card.score(*own, 2, 0, launch.launch_id)
        started.append((run, own, launch, run_score_launch))
        made = random_shadow_launch(card.spec, [70 + seed, 300])
        own = card.buffers(card.shadow, parts_of(made))
        run = card.shadow(*own, 2, made.launch_id)
        started.append((run, own, made, run_shadow_launch))
    for run, own, launch, golden in reversed(started):
        run.wait()
        check(own, launch, golden(card.spec, launch))


def sub_buffers(card, folder):
    """Every argument is a part of one buffer."""
    launch = random_launch(card.spec, Scope.LAYER, TOKENS)
    parts = parts_of(launch)
    starts = np.cumsum([0] + [-(-part.nbytes // PAGE) * PAGE for part in parts])
    whole = pyxrt.bo(card.device, int(starts[-1]), pyxrt.bo.normal, card.score.group_id(0))
    own = []
    for part, start in zip(parts, starts, strict=False):
        own.append(pyxrt.bo(whole, max(part.nbytes, 64), int(start)))
        own[-1].write(part.tobytes(), 0)
        own[-1].sync(TO_DEVICE)
    card.score(*own, len(TOKENS), 0, launch.launch_id).wait()
    check(own, launch, run_score_launch(card.spec, launch))


def peer_to_peer(card, folder):
    """Keys come from a file past the host's buffers, and a new shadow goes into one."""
    launch = random_launch(card.spec, Scope.LAYER, TOKENS)
    own = card.buffers(card.score, parts_of(launch))
    own[1] = read_direct(card, card.score, folder / "shadow", launch.shadow)
    card.score(*own, len(TOKENS), 0, launch.launch_id).wait()
    check(own, launch, run_score_launch(card.spec, launch))

    made = random_shadow_launch(card.spec, TOKENS)
    golden = run_shadow_launch(card.spec, made)
    own = card.buffers(card.shadow, parts_of(made))
    own[1] = read_direct(card, card.shadow, folder / "rows", made.rows)
    own[3] = read_direct(card, card.shadow, folder / "before", made.shadow)
    card.shadow(*own, len(TOKENS), made.launch_id).wait()
    file = os.open(folder / "after", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    assert os.pwrite(file, own[3].map(), 0) == own[3].size()
    os.close(file)
    written = (folder / "after").read_bytes()[: golden.output.nbytes]
    assert written == golden.output.tobytes()


def read_direct(card, kernel, path, content):
    """A P2P buffer that was filled from a file without the page cache."""
    size = -(-content.nbytes // PAGE) * PAGE
    path.write_bytes(content.tobytes().ljust(size, b"\0"))
    buffer = pyxrt.bo(card.device, size, pyxrt.bo.p2p, kernel.group_id(1))
    memory = buffer.map()
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    block = 16 * mmap.PAGESIZE
    for start in range(0, size, block):
        part = memory[start : start + block]
        assert os.preadv(file, [part], start) == len(part)
    os.close(file)
    return buffer


def close_and_reopen(card, folder):
    """A card is let go and opened again in one process."""
    xclbin = sys.argv[2]
    for _ in range(2):
        both_kernels(card, folder)
        card.score = card.shadow = card.device = None
        card = Card(xclbin)
    both_kernels(card, folder)


def image(card, folder):
    """XRT reads back what the packer wrote."""
    read = pyxrt.xclbin(sys.argv[2])
    own = Xclbin.read(Path(sys.argv[2]))
    assert read.get_xsa_name() == own.platform
    assert read.get_uuid().to_string() == str(own.uuid) == card.uuid.to_string()
    assert [one.get_name() for one in read.get_kernels()] == ["score_tokens", "make_shadow"]
    assert [one.get_num_args() for one in read.get_kernels()] == [8, 7]
    names = [one.get_name() for one in read.get_kernels()[0].get_args()]
    assert names == [
        "segments", "shadow", "queries", "scores", "status", "segment_count", "scope", "launch_id"
    ]  # fmt: skip
    (bank,) = [one for one in read.get_mems() if one.get_tag() == "bank0"]
    assert (bank.get_size_kb(), bank.get_base_address(), bank.get_used()) == (4 << 20, 0, True)
    assert card.score.group_id(0) == bank.get_index()
    for bad in (object(), "text"):
        with pytest.raises(TypeError, match="pass a bo, an int or a float"):
            card.score(bad)


PROGRAMS = {
    one.__name__: one
    for one in (
        image, both_kernels, launches_in_flight, sub_buffers, peer_to_peer, close_and_reopen
    )
}  # fmt: skip

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Card(sys.argv[2]), Path(sys.argv[3]))
