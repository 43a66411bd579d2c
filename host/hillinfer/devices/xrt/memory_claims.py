# SPDX-License-Identifier: Apache-2.0
"""Who has taken how much of a card's memory: processes share a card by it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MemoryClaims:
    """The claims of one process on one card, beside those of the user's other processes.

    First come, first served, piece by piece: a claim is admitted while all of them fit in the
    card's memory, and those of processes that have ended do not count. Processes of other users
    are not seen here; where the card has no memory left for a claim, it is given back.

    Parameters
    ----------
    folder
        Where the claims of all cards lie, owner-only.
    card
        Names the card.
    memory_bytes
        What all processes together may take.
    """

    def __init__(self, folder: Path, card: str, memory_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A card's name is no file's.
        self._path = folder / f"{hashlib.sha256(card.encode()).hexdigest()[:16]}.json"
        self._memory_bytes = memory_bytes
        self._own = f"{os.getpid()} {_start_of(os.getpid())} {id(self):x}"

    def claim(self, size: int) -> bool:
        """Take bytes; False where they do not fit beside what all processes hold."""
        with self._claims() as claims:
            if sum(claims.values()) + size > self._memory_bytes:
                return False
            claims[self._own] = claims.get(self._own, 0) + size
            return True

    def give_back(self, size: int) -> None:
        """Let go of bytes that were claimed and could not be taken."""
        with self._claims() as claims:
            claims[self._own] = claims.get(self._own, 0) - size

    def release(self) -> None:
        """Let go of everything; harmless when done twice."""
        with self._claims() as claims:
            claims.pop(self._own, None)

    @contextmanager
    def _claims(self) -> Iterator[dict[str, int]]:
        """Yield the claims of living processes, and keep what the block makes of them."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            claims = _living(os.pread(file, 1 << 20, 0))
            yield claims
            content = json.dumps(claims).encode()
            os.ftruncate(file, 0)
            os.pwrite(file, content, 0)
        finally:
            os.close(file)


def _living(content: bytes) -> dict[str, int]:
    """Return the claims whose processes still run; none where the file says nothing sensible."""
    try:
        claims = json.loads(content or b"{}")
    except ValueError:
        return {}
    living = {}
    for own, size in claims.items() if isinstance(claims, dict) else ():
        pid, start, _ = (*own.split(), "", "", "")[:3]
        if pid.isdigit() and isinstance(size, int) and start == _start_of(int(pid)):
            living[own] = size
    return living


def _start_of(pid: int) -> str:
    """Return when a process started, as its number may come again; empty if there is none."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in brackets may hold anything, so fields count from its end.
    return content.rpartition(")")[2].split()[19]
