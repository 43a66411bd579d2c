# SPDX-License-Identifier: Apache-2.0
"""Status beats: how far a launch has come, and how it ended."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hillinfer_model.beats import Beats, from_beats, to_beats
from hillinfer_model.launch_error import ErrorCode

HASH_BYTES = 8
_FORMAT = struct.Struct("<8sIII")


@dataclass(frozen=True)
class StatusBeat:
    """The status of one segment of a launch (contract, section 11).

    Parameters
    ----------
    spec_hash
        First 8 bytes of `KernelSpec.digest()`.
    launch_id
        The launch's, unsigned 32 bit.
    tokens_complete
        Tokens whose scores are in memory, in every KV head.
    error
        How the launch ended; `ErrorCode.NONE` while it goes on.
    """

    spec_hash: bytes
    launch_id: int
    tokens_complete: int
    error: ErrorCode

    def __post_init__(self) -> None:
        """Refuse values that do not fit their fields."""
        if len(self.spec_hash) != HASH_BYTES:
            raise ValueError(f"spec_hash has {len(self.spec_hash)} bytes, not {HASH_BYTES}")
        for name in ("launch_id", "tokens_complete"):
            value = getattr(self, name)
            if not 0 <= value < 2**32:
                raise ValueError(f"{name}={value} does not fit an unsigned field of 32 bits")

    def pack(self) -> Beats:
        """Return the status as one beat, uint8 of shape (1, 64)."""
        return to_beats(
            _FORMAT.pack(self.spec_hash, self.launch_id, self.tokens_complete, self.error)
        )

    @classmethod
    def unpack(cls, block: Beats) -> StatusBeat:
        """Read one beat, uint8 of shape (1, 64).

        Raises
        ------
        LaunchError
            Where a spare byte is not zero (`ErrorCode.RESERVED_NOT_ZERO`).
        ValueError
            Where the error is none the contract knows.
        """
        content = from_beats(block, _FORMAT.size, "status beat")
        spec_hash, launch_id, tokens_complete, error = _FORMAT.unpack(content)
        return cls(spec_hash, launch_id, tokens_complete, ErrorCode(error))
