# SPDX-License-Identifier: Apache-2.0
"""What the worker tells of a launch lies in the window before it is told."""

import json
import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest

from hillinfer.devices.xrt.worker import Worker

TOKENS, SEGMENTS, TOKEN_BYTES = 64, 3, 4
SEGMENT_BYTES = TOKENS * TOKEN_BYTES
SCORES_AT = 8192


class Memory:
    """A buffer of a card; `look` is called at every read."""

    def __init__(self, size, look=lambda: None):
        self.content = bytearray(size)
        self._look = look

    def size(self):
        return len(self.content)

    def map(self):
        return self.content

    def address(self):
        return 0

    def write(self, content, offset):
        self.content[offset : offset + len(content)] = content

    def read(self, size, offset):
        self._look()
        return bytes(self.content[offset : offset + size])

    def sync(self, direction, size, offset):
        pass


class Card:
    """Scores half a segment each time its status is read, scores first, as the kernel does.

    Kernel and run in one: whoever calls it has launched it.
    """

    def __init__(self):
        self.scores = Memory(SEGMENTS * SEGMENT_BYTES)
        self.status = Memory(SEGMENTS * 64, self.go_on)
        self.halves = 0

    def __call__(self, *arguments):
        return self

    def group_id(self, argument):
        return argument

    def go_on(self):
        if self.halves == 2 * SEGMENTS:
            return
        segment, half = divmod(self.halves, 2)
        start = segment * SEGMENT_BYTES + half * SEGMENT_BYTES // 2
        self.scores.write(b"\x77" * (SEGMENT_BYTES // 2), start)
        complete = np.uint32((half + 1) * TOKENS // 2).tobytes()
        self.status.write(b"hash----" + bytes(4) + complete, segment * 64)
        self.halves += 1

    def state(self):
        return "COMPLETED" if self.halves == 2 * SEGMENTS else "RUNNING"

    def wait(self):
        pass


class Channel:
    """Keeps every message with what the window held when it was sent."""

    def __init__(self, window):
        self.window = window
        self.sent = []

    def send(self, message):
        self.sent.append((json.loads(message), bytes(self.window[SCORES_AT:])))


class Buffers:
    """Makes the buffers of a card: scores and status are what its kernel writes."""

    normal, p2p = "normal", "p2p"

    def __init__(self, card):
        self._own = {3: card.scores, 4: card.status}

    def __call__(self, device, size, kind, argument):
        return self._own.get(argument) or Memory(4096)


def xrt_of(card):
    """Return as much of pyxrt as a worker asks for, over one card."""
    running = ("NEW", "QUEUED", "SUBMITTED", "RUNNING")
    bank = SimpleNamespace(get_index=lambda: 1, get_size_kb=lambda: 1024)
    return SimpleNamespace(
        bo=Buffers(card),
        device=lambda index: SimpleNamespace(
            load_xclbin=lambda path: None, get_info=lambda what: what
        ),
        kernel=lambda device, loaded, name: card,
        xclbin=lambda path: SimpleNamespace(get_mems=lambda: [bank]),
        xrt_info_device=SimpleNamespace(name="name", bdf="bdf"),
        ert_cmd_state=SimpleNamespace(**{f"ERT_CMD_STATE_{name}": name for name in running}),
        xclBOSyncDirection=SimpleNamespace(
            XCL_BO_SYNC_BO_TO_DEVICE=0, XCL_BO_SYNC_BO_FROM_DEVICE=1
        ),
    )


@pytest.fixture
def launched():
    size = SCORES_AT + SEGMENTS * SEGMENT_BYTES
    shared = os.memfd_create("window")
    os.ftruncate(shared, size)
    channel = Channel(mmap.mmap(shared, size))
    worker = Worker(xrt_of(Card()), channel)
    # As the host asks, one after the other.
    worker.do_window(shared, size)
    worker.do_open("any", 0)
    worker.do_chunk(4096)
    answer = worker.do_score(
        chunk=0,
        parts={
            "segments": [0, 64],
            "queries": [4096, 64],
            "scores": [SCORES_AT, SEGMENTS * SEGMENT_BYTES],
        },
        score_bytes=[number * SEGMENT_BYTES for number in range(SEGMENTS + 1)],
        scope=0,
        launch_id=1,
    )
    assert answer == {"state": "COMPLETED"}
    return channel.sent


def test_scores_lie_in_the_window_when_their_count_is_told(launched):
    told = dict.fromkeys(range(SEGMENTS), 0)
    for message, window in launched:
        for segment, beat in message["status"]:
            told[segment] = int(np.frombuffer(bytes.fromhex(beat), "<u4")[3])
            start = segment * SEGMENT_BYTES
            own = window[start : start + told[segment] * TOKEN_BYTES]
            assert own == b"\x77" * len(own)
    assert told == dict.fromkeys(range(SEGMENTS), TOKENS)


def test_progress_is_told_while_the_launch_goes_on(launched):
    assert len(launched) == 2 * SEGMENTS
