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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

_SCORE, _MAKE = "score_tokens", "make_shadow"
# By kernel, its buffers in the order of its arguments; keys, rows and shadows lie in chunks.
KERNELS = {
    _SCORE: ("segments", "keys", "queries", "scores", "status"),
    _MAKE: ("segments", "rows", "statistics", "shadow", "status"),
}
# Of a kernel that casts the keys of rows while it scores.
CASTING_KERNELS = {_SCORE: ("segments", "keys", "statistics", "queries", "scores", "status")}
# What the host sends with a launch.
_SENT = ("segments", "statistics", "queries")
_MESSAGE_BYTES = 1 << 16
# As many segments as a launch brings from the drive.
_MOST_FILES = 16
_STATUS_BEAT = 64
# In place of a chunk's number: the memory that rows are read to, for `make_shadow`.
ROWS_CHUNK = -1
# As many as surely fit in a message.
_BEATS_A_MESSAGE = 256
_READS_AT_ONCE = 4
# How long to wait before looking at the status again: short at first, as launches are.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.0002, 0.005


class _FullError(RuntimeError):
    """The card has no memory left."""


class Worker:
    """One card, opened, and the buffers on it; `channel` leads to the host, which asks."""

    def __init__(self, pyxrt: Any, channel: socket.socket) -> None:
        self._xrt = pyxrt
        self._channel = channel
        self._window: Any = None
        self._device: Any = None
        self._kernels: dict[str, Any] = {}
        self._arguments: dict[str, Sequence[str]] = {}
        self._chunks: list[tuple[Any, Any]] = []
        self._rows: tuple[Any, Any] | None = None
        self._buffers: dict[tuple[str, str], Any] = {}
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
            except _FullError as error:
                # Another user's process may have been first.
                answer = {"full": str(error)}
            except (RuntimeError, OSError, ValueError, TypeError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            self._send(answer)

    def do_window(self, file: int, size: int) -> dict[str, Any]:
        """Share the host's memory."""
        self._window = memoryview(mmap.mmap(file, size))
        os.close(file)
        return {}

    def do_open(
        self, xclbin: str, index: int, kernels: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, Any]:
        """Load the card, and open some of its kernels, with the buffers of each."""
        xrt = self._xrt
        self._arguments = dict(kernels or {_SCORE: KERNELS[_SCORE]})
        self._device = xrt.device(index)
        loaded = self._device.load_xclbin(xclbin)
        self._kernels = {name: xrt.kernel(self._device, loaded, name) for name in self._arguments}
        bank = self._kernels[_SCORE].group_id(1)
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
        self._chunks.append(self._shared(size, self._kernels[_SCORE].group_id(1)))
        return {"address": self._chunks[-1][0].address()}

    def do_rows(self, size: int) -> dict[str, Any]:
        """Take memory that the drive writes rows into (P2P)."""
        self._rows = self._shared(size, self._kernels[_MAKE].group_id(1))
        return {}

    def _shared(self, size: int, bank: int) -> tuple[Any, Any]:
        """Return a buffer that the drive reaches, and its memory."""
        try:
            buffer = self._xrt.bo(self._device, size, self._xrt.bo.p2p, bank)
        except RuntimeError as error:
            raise _FullError(str(error)) from error
        try:
            return buffer, memoryview(buffer.map()).cast("B")
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}; is P2P enabled for the card? `hillinfer doctor` says how"
            ) from error

    def do_write(self, chunk: int, offset: int, at: int, size: int) -> dict[str, Any]:
        """Copy from the window into a chunk."""
        self._chunks[chunk][1][offset : offset + size] = self._window[at : at + size]
        return {}

    def do_load(self, *files: int, parts: list[list[int]], block: int) -> dict[str, Any]:
        """Read from files straight into the card's memory (P2P), several blocks at once.

        `parts` says for each stretch which file, which chunk, where in the chunk, where in the file
        and how many bytes.
        """
        begun = time.perf_counter()
        return {"seconds": self._end_load(files, self._begin_load(files, parts, block)) - begun}

    def _begin_load(
        self, files: Sequence[int], parts: list[list[int]], block: int
    ) -> list[Future[float]]:
        def read(file: int, chunk: int, begin: int, file_offset: int, size: int) -> float:
            place = self._rows if chunk == ROWS_CHUNK else self._chunks[chunk]
            if place is None:
                raise ValueError("there is no memory for rows")
            done = 0
            while done < size:
                own = [place[1][begin + done : begin + size]]
                count = os.preadv(files[file], own, file_offset + done)
                if count == 0:
                    raise OSError(f"the file of shadows ends at byte {file_offset + done}")
                done += count
            return time.perf_counter()

        return [
            self._readers.submit(
                read, file, chunk, to + start, at + start, min(block, size - start)
            )
            for file, chunk, to, at, size in parts
            for start in range(0, size, block)
        ]

    @staticmethod
    def _end_load(files: Sequence[int], reads: Sequence[Future[float]]) -> float:
        """Wait for reads and return when the last of them ended."""
        wait(reads)
        for file in files:
            os.close(file)
        return max(one.result() for one in reads)

    def do_read(self, chunk: int, offset: int, at: int, size: int) -> dict[str, Any]:
        """Copy from a chunk into the window."""
        self._window[at : at + size] = self._chunks[chunk][1][offset : offset + size]
        return {}

    def do_score(
        self,
        *files: int,
        chunk: int,
        parts: dict[str, list[int]],
        score_bytes: list[int],
        scope: int,
        launch_id: int,
        ahead: Sequence[list[int]] = (),
        block: int = _MESSAGE_BYTES,
    ) -> dict[str, Any]:
        """Launch, and tell of every status beat that changes until the launch has ended.

        `parts` says for segments, queries, scores and, where keys are cast, statistics where in the
        window they lie and how many bytes they have; `score_bytes` where each segment's scores
        begin, and the last one's end. What the next launch scores is read meanwhile, and how long
        that took is told in the end: `ahead` and `block` are as `parts` and `block` of `do_load`.
        """
        segments = len(score_bytes) - 1
        at, size = parts["scores"]
        scores = self._buffer(_SCORE, "scores", size)
        own = {**self._all_sent(_SCORE, parts), "keys": self._chunks[chunk][0], "scores": scores}

        def fetch(changed: dict[int, bytes]) -> None:
            # What a status counts was written before it, so it is there when read after it; the
            # host hears of it when it lies in the window.
            start, stop = score_bytes[min(changed)], score_bytes[max(changed) + 1]
            self._fetch(scores, at, start, stop - start)

        begun = time.perf_counter()
        reads = self._begin_load(files, list(ahead), block)
        try:
            answer = self._followed(_SCORE, own, segments, (scope, launch_id), fetch)
        finally:
            if reads:
                seconds = self._end_load(files, reads) - begun
        return {**answer, "seconds": seconds} if reads else answer

    def do_make(
        self, chunk: int, parts: dict[str, list[int]], segments: int, launch_id: int
    ) -> dict[str, Any]:
        """Make shadows of rows that were loaded, and tell of status beats as `do_score` does.

        `parts` says for segments and statistics where in the window they lie and how many bytes
        they have.
        """
        if self._rows is None:
            raise ValueError("there is no memory for rows")
        own = self._all_sent(_MAKE, parts)
        own |= {"rows": self._rows[0], "shadow": self._chunks[chunk][0]}
        return self._followed(_MAKE, own, segments, (launch_id,), lambda changed: None)

    def _followed(
        self,
        kernel: str,
        buffers: Mapping[str, Any],
        segments: int,
        numbers: Sequence[int],
        fetch: Callable[[dict[int, bytes]], None],
    ) -> dict[str, Any]:
        """Launch a kernel with buffers and numbers, and follow it to its end.

        `fetch` is called with status beats that have changed, before the host hears of them.
        """
        beats = self._buffer(kernel, "status", segments * _STATUS_BEAT)
        beats.write(bytes(segments * _STATUS_BEAT), 0)
        beats.sync(
            self._xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, segments * _STATUS_BEAT, 0
        )
        given = {**buffers, "status": beats}
        ordered = [given[name] for name in self._arguments[kernel]]
        run = self._kernels[kernel](*ordered, segments, *numbers)
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
            changed = self._changed(beats, known)
            if changed:
                fetch(changed)
                self._tell(changed)
                delay = _FIRST_DELAY_S
            if state not in going_on:
                # The state of a run whose end nobody waits for is not that of its last moment.
                run.wait()
                return {"state": str(state).rpartition(".")[2]}
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)

    def _changed(self, buffer: Any, known: list[bytes]) -> dict[int, bytes]:
        """Read the status beats; return those that are not as known, and know them."""
        size = len(known) * _STATUS_BEAT
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

    def _fetch(self, buffer: Any, at: int, offset: int, size: int) -> None:
        """Bring a part of a buffer to the same part of its place in the window."""
        buffer.sync(self._xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE, size, offset)
        self._window[at + offset : at + offset + size] = buffer.read(size, offset)

    def _all_sent(self, kernel: str, parts: dict[str, list[int]]) -> dict[str, Any]:
        """Return the buffers of what the host sends with a launch, by their names."""
        return {name: self._sent(kernel, name, parts[name]) for name in _SENT if name in parts}

    def _sent(self, kernel: str, name: str, part: list[int]) -> Any:
        """Return a buffer with what lies in a part of the window."""
        at, size = part
        buffer = self._buffer(kernel, name, size)
        buffer.write(self._window[at : at + size], 0)
        buffer.sync(self._xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, size, 0)
        return buffer

    def _buffer(self, kernel: str, name: str, size: int) -> Any:
        """Return a buffer of at least some size; it grows and never shrinks."""
        kept = self._buffers.get((kernel, name))
        if kept is None or kept.size() < size:
            size = max(size, 4096, 2 * kept.size() if kept is not None else 0)
            bank = self._kernels[kernel].group_id(self._arguments[kernel].index(name))
            kept = self._xrt.bo(self._device, size, self._xrt.bo.normal, bank)
            self._buffers[kernel, name] = kept
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
