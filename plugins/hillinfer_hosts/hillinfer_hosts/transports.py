# SPDX-License-Identifier: Apache-2.0
"""Transports that put rows straight into another host's memory, beside HTTP; each is optional.

The host that has rows writes them into memory that the one that wants them has registered. Requests
and answers stay HTTP, with their key. Whatever fails here, the bytes come by HTTP instead. What a
transport brings is compared with checksums like anything else that another host sends.
"""

from __future__ import annotations

import hashlib
import importlib
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import HillInferError
from hillinfer_hosts.directory import HostsError

# Hosts that are known at once; the one that asked longest ago is met anew.
_MOST_PEERS = 64
# What may wait for a piece of memory before HTTP is taken.
_ROOM_SECONDS = 0.5
_LOOK_SECONDS = 0.0002


class TransportError(HillInferError):
    """A transport did not bring bytes; HTTP does."""


class Transporting(StrEnum):
    """What brings rows between hosts."""

    HTTP = "http"
    """Range reads."""
    NIXL = "nixl"
    """NVIDIA's transfer library, over UCX: RDMA, shared memory or TCP, whatever both have."""


class Transport(Protocol):
    """Writes memory of this host into that of another; any thread may."""

    @property
    def name(self) -> str:
        """What both hosts call it."""

    @property
    def introduction(self) -> bytes:
        """How others reach the memory that was registered; asked behind all `register`."""

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Let memory be written to and from; TransportError where that is not possible."""

    def meet(self, introduction: bytes) -> str:
        """Return the name of a host that introduces itself; TransportError where it is none."""

    def part(self, peer: str) -> None:
        """Forget a host."""

    def write(self, peer: str, memory: NDArray[np.uint8], address: int, seconds: float) -> None:
        """Copy registered memory to an address of another host's, or raise TransportError."""


class NixlTransport:
    """NIXL's agent over UCX.

    Parameters
    ----------
    name
        Of its agent; one that nobody else has where None.

    Raises
    ------
    HostsError
        Where NIXL is not installed, or does not start here.
    """

    name = Transporting.NIXL.value

    def __init__(self, name: str | None = None) -> None:
        try:
            api: Any = importlib.import_module("nixl._api")
        except ImportError as error:
            raise HostsError(
                f"NIXL cannot be imported ({error}): pip install 'hillinfer-hosts[nixl]', or "
                "--transport http"
            ) from error
        try:
            config = api.nixl_agent_config(backends=["UCX"])
            self._agent = api.nixl_agent(name or secrets.token_hex(16), config)
        except Exception as error:
            raise HostsError(f"NIXL does not start ({error}): use --transport http") from error
        # NIXL's agents are for one thread, where nothing else is asked of them.
        self._lock = threading.Lock()
        self._kept: list[Any] = []

    @property
    def introduction(self) -> bytes:
        """Return the agent's metadata: its addresses and what was registered."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Register memory with UCX."""
        place = [(memory.ctypes.data, memory.nbytes, 0, "")]
        with self._lock, _told("register memory"):
            self._kept.append((memory, self._agent.register_memory(place, "DRAM")))

    def meet(self, introduction: bytes) -> str:
        """Load another agent's metadata and return its name."""
        with self._lock, _told("meet another host"):
            name = self._agent.add_remote_agent(introduction)
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, peer: str) -> None:
        """Forget another agent."""
        with self._lock, suppress(Exception):
            self._agent.remove_remote_agent(peer)

    def write(self, peer: str, memory: NDArray[np.uint8], address: int, seconds: float) -> None:
        """Write to another agent's memory and wait until it is there."""
        until = time.monotonic() + seconds
        with self._lock, _told("write"):
            own, other = (
                self._agent.get_xfer_descs([(at, memory.nbytes, 0)], "DRAM")
                for at in (memory.ctypes.data, address)
            )
            handle = self._agent.initialize_xfer("WRITE", own, other, peer)
            try:
                state = self._agent.transfer(handle)
                while state == "PROC" and time.monotonic() < until:
                    time.sleep(_LOOK_SECONDS)
                    state = self._agent.check_xfer_state(handle)
            finally:
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransportError(f"NIXL did not write: {state}")


def opened_transport(which: Transporting) -> Transport | None:
    """Return a transport that is ready; None where HTTP brings everything.

    Raises
    ------
    HostsError
        Where it is not installed, or does not start here.
    """
    return NixlTransport() if which is Transporting.NIXL else None


class DirectMemory:
    """Registered memory of a host, in pieces, and the other hosts that were met.

    Parameters
    ----------
    transport
        Which has it registered.
    pieces, piece_bytes
        How many there are, and their size.

    Raises
    ------
    TransportError
        Where it cannot be registered.
    """

    def __init__(self, transport: Transport, pieces: int, piece_bytes: int) -> None:
        self._transport = transport
        memory = aligned_buffer(pieces * piece_bytes)[: pieces * piece_bytes]
        transport.register(memory)
        self.name, self.introduction = transport.name, transport.introduction
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        for at in range(pieces):
            self._free.put(memory[at * piece_bytes : (at + 1) * piece_bytes])
        self._peers: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, byte_count: int) -> Iterator[NDArray[np.uint8] | None]:
        """Give a piece of so many bytes to one at a time; None where none is free soon.

        What is late in writing to it writes into another's bytes, whose checksums say so.
        """
        try:
            piece = self._free.get(timeout=_ROOM_SECONDS)
        except queue.Empty:
            yield None
            return
        try:
            yield piece[:byte_count] if byte_count <= len(piece) else None
        finally:
            self._free.put(piece)

    def meet(self, introduction: bytes) -> str:
        """Return what another host calls itself from here on; TransportError where it is none."""
        known = hashlib.sha256(introduction).hexdigest()[:32]
        with self._lock:
            if known not in self._peers:
                self._peers[known] = self._transport.meet(introduction)
                if len(self._peers) > _MOST_PEERS:
                    self._transport.part(self._peers.popitem(last=False)[1])
            self._peers.move_to_end(known)
        return known

    def write(self, known: str, data: NDArray[np.uint8], address: int, seconds: float) -> None:
        """Copy a piece of this memory to a host that was met, or raise TransportError."""
        with self._lock:
            peer = self._peers.get(known)
        if peer is None:
            raise TransportError("nobody of that name was met")
        self._transport.write(peer, data, address, seconds)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn whatever a library raises into one error."""
    try:
        yield
    except Exception as error:
        raise TransportError(f"NIXL did not {what}: {error}") from error
