# SPDX-License-Identifier: Apache-2.0
"""The process that makes all calls to XRT: run as a program, asked through a socket.

XRT can end a process or spin in it for ever, so the host never calls it. This file needs pyxrt and
nothing of the host, not even its packages: it starts fast and takes little memory.

Every message is one packet of JSON. Bulk data lies in the window, memory that host and worker
share; messages say where. The host holds all deadlines.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_MESSAGE_BYTES = 1 << 16
# As many segments as a launch brings from the drive.
_MOST_FILES = 16
_STATUS_BEAT = 64
# As many as surely fit in a message.
_BEATS_A_MESSAGE = 256
_READS_AT_ONCE = 4
# How long to wait before looking at the status again: short at first, as launches are.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.0002, 0.005


class Worker:
    """One card, opened, and the buffers on it.

    `channel` leads to the host; open calls come from it.
    """

    def __init__(self, pyxrt: Any, channel: socket.socket) -> None:
        self._xrt = pyxrt
        self._channel = channel
        self._window: Any = None
        self._device: Any = None
        self._kernel: Any = None
        self._chunks: list[tuple[Any, Any]] = []
        self._buffers: dict[str, Any] = {}
        self._readers = ThreadPoolExecutor(_READS_AT_ONCE)

    def serve(self) -> None:
        """Answer until the host closes the channel."""
        while True:
            content, files, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, _MOST_FILES)
            if not content:
                return
            asked = json.loads(content)
            call = getattr(self, f"do_{asked.pop('do')}")
            try:
                answer = call(*files, **asked)
            except (RuntimeError, OSError, ValueError, TypeError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            self._send(answer)

    def do_window(self, file: int, size: int) -> dict[str, Any]:
        """Share the host's memory."""
        self._window = memoryview(mmap.mmap(file, size))
        os.close(file)
        return {}

    def do_open(self, xclbin: str, index: int) -> dict[str, Any]:
        """Load the card."""
        xrt = self._xrt
        self._device = xrt.device(index)
        loaded = self._device.load_xclbin(xclbin)
        self._kernel = xrt.kernel(self._device, loaded, "score_tokens")
        bank = self._kernel.group_id(1)
        # What it tells of points into it, and reads as anything once it is gone.
        image = xrt.xclbin(xclbin)
        (size_kb,) = [one.get_size_kb() for one in image.get_mems() if one.get_index() == bank]
        name = self._device.get_info(xrt.xrt_info_device.name)
        if "XCL_EMULATION_MODE" in os.environ:
            # Each process has an emulated card of its own, whatever place on a bus it tells.
            place = str(Path.cwd())
        else:
            place = self._device.get_info(xrt.xrt_info_device.bdf)
        return {"name": name, "place": place, "memory_bytes": size_kb * 1024}

    def do_chunk(self, size: int) -> dict[str, Any]:
        """Take memory for shadows; drive and host write into it past any host copy (P2P)."""
        try:
            buffer = self._xrt.bo(self._device, size, self._xrt.bo.p2p, self._kernel.group_id(1))
        except RuntimeError as error:
            # Another user's process may have been first.
            return {"full": str(error)}
        try:
            memory = memoryview(buffer.map()).cast("B")
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}; is P2P enabled for the card? `hillinfer doctor` says how"
            ) from error
        self._chunks.append((buffer, memory))
        return {"address": buffer.address()}

    def do_write(self, chunk: int, offset: int, at: int, size: int) -> dict[str, Any]:
        """Copy from the window into a chunk."""
        self._chunks[chunk][1][offset : offset + size] = self._window[at : at + size]
        return {}

    def do_load(self, *files: int, parts: list[list[int]], size: int, block: int) -> dict[str, Any]:
        """Read from files straight into chunks (P2P), several blocks at once.

        `parts` says for each stretch of `size` bytes which file, which chunk, where in the chunk
        and where in the file.
        """

        def read(piece: tuple[list[int], int]) -> None:
            (file, chunk, offset, file_offset), start = piece
            memory = self._chunks[chunk][1]
            done, stop = start, min(start + block, size)
            while done < stop:
                own = [memory[offset + done : offset + stop]]
                count = os.preadv(files[file], own, file_offset + done)
                if count == 0:
                    raise OSError(f"the file of shadows ends at byte {file_offset + done}")
                done += count

        begun = time.perf_counter()
        try:
            pieces = [(part, start) for part in parts for start in range(0, size, block)]
            list(self._readers.map(read, pieces))
        finally:
            for file in files:
                os.close(file)
        return {"seconds": time.perf_counter() - begun}

    def do_read(self, chunk: int, offset: int, at: int, size: int) -> dict[str, Any]:
        """Copy from a chunk into the window."""
        self._window[at : at + size] = self._chunks[chunk][1][offset : offset + size]
        return {}

    def do_score(
        self,
        chunk: int,
        parts: dict[str, list[int]],
        score_bytes: list[int],
        scope: int,
        launch_id: int,
    ) -> dict[str, Any]:
        """Launch, and tell of every status beat that changes until the launch has ended.

        `parts` says for segments, queries and scores where in the window they lie and how many
        bytes they have; `score_bytes` where each segment's scores begin, and the last one's end.
        """
        segments = len(score_bytes) - 1
        buffers = []
        for index, name in ((0, "segments"), (2, "queries"), (3, "scores")):
            at, size = parts[name]
            buffer = self._buffer(name, index, size)
            if name != "scores":
                buffer.write(self._window[at : at + size], 0)
                buffer.sync(self._xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, size, 0)
            buffers.append(buffer)
        beats = self._buffer("status", 4, segments * _STATUS_BEAT)
        beats.write(bytes(segments * _STATUS_BEAT), 0)
        beats.sync(
            self._xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, segments * _STATUS_BEAT, 0
        )
        memory, _ = self._chunks[chunk]
        descriptors, queries, scores = buffers
        run = self._kernel(descriptors, memory, queries, scores, beats, segments, scope, launch_id)
        states = self._xrt.ert_cmd_state
        going_on = (
            states.ERT_CMD_STATE_NEW,
            states.ERT_CMD_STATE_QUEUED,
            states.ERT_CMD_STATE_SUBMITTED,
            states.ERT_CMD_STATE_RUNNING,
        )
        known, delay = [bytes(_STATUS_BEAT)] * segments, _FIRST_DELAY_S
        while True:
            state = run.state()
            changed = self._changed(known)
            if changed:
                # What a status counts was written before it, so it is there when read after it;
                # the host hears of it when it lies in the window.
                start, stop = score_bytes[min(changed)], score_bytes[max(changed) + 1]
                self._fetch("scores", parts["scores"][0], start, stop - start)
                self._tell(changed)
                delay = _FIRST_DELAY_S
            if state not in going_on:
                # The state of a run whose end nobody waits for is not that of its last moment.
                run.wait()
                return {"state": str(state).rpartition(".")[2]}
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)

    def _changed(self, known: list[bytes]) -> dict[int, bytes]:
        """Read the status beats; return those that are not as known, and know them."""
        buffer, size = self._buffers["status"], len(known) * _STATUS_BEAT
        buffer.sync(self._xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE, size, 0)
        beats = bytes(buffer.read(size, 0))
        changed = {}
        for segment, before in enumerate(known):
            now = beats[segment * _STATUS_BEAT : (segment + 1) * _STATUS_BEAT]
            if now != before:
                known[segment] = changed[segment] = now
        return changed

    def _tell(self, changed: dict[int, bytes]) -> None:
        """Send status beats, a message's worth at a time."""
        found = [[segment, beat.hex()] for segment, beat in changed.items()]
        for start in range(0, len(found), _BEATS_A_MESSAGE):
            self._send({"status": found[start : start + _BEATS_A_MESSAGE]})

    def _fetch(self, name: str, at: int, offset: int, size: int) -> None:
        """Bring a part of a buffer to the same part of its place in the window."""
        buffer = self._buffers[name]
        buffer.sync(self._xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE, size, offset)
        self._window[at + offset : at + offset + size] = buffer.read(size, offset)

    def _buffer(self, name: str, index: int, size: int) -> Any:
        """Return a buffer of at least some size; it grows and never shrinks."""
        kept = self._buffers.get(name)
        if kept is None or kept.size() < size:
            size = max(size, 4096, 2 * kept.size() if kept is not None else 0)
            kept = self._xrt.bo(
                self._device, size, self._xrt.bo.normal, self._kernel.group_id(index)
            )
            self._buffers[name] = kept
        return kept

    def _send(self, answer: dict[str, Any]) -> None:
        self._channel.send(json.dumps(answer).encode())


def main() -> None:
    """Serve; the argument is the number of the channel."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    # What the driver starts must not hold it open when this process has ended.
    channel.set_inheritable(False)
    # Python closes sockets before it lets go of what XRT made. This one the system closes, when
    # this process has ended: then the card is let go, and the host may kill what is left.
    os.dup(channel.fileno())
    try:
        import pyxrt
    except ImportError as error:
        channel.send(json.dumps({"error": f"cannot import pyxrt: {error}"}).encode())
        return
    worker = Worker(pyxrt, channel)
    channel.send(b'{"ready": true}')
    worker.serve()


if __name__ == "__main__":
    main()
