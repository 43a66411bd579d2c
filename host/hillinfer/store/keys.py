# SPDX-License-Identifier: Apache-2.0
"""What a stored prefix is found by: hashes of its tokens, below a namespace of everything else."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.kernel_spec import GROUP_TOKENS

# Of the files and of what is hashed.
STORE_VERSION = 1
# Tokens of a chunk: those of a shadow segment, which have their statistics in common.
CHUNK_TOKENS = 1024
CHUNK_GROUPS = CHUNK_TOKENS // GROUP_TOKENS
KEY_BYTES = 32
# Token numbers are hashed and stored as these.
TOKEN_TYPE = np.dtype("<u4")

# --- Everything that changes the bits of KV ---


@dataclass(frozen=True)
class Namespace:
    """Everything but tokens that decides which bits a row has; rows of two never meet.

    Parameters
    ----------
    about
        Canonical JSON of what the KV was made by: digest of weights, config, rotary settings,
        number types, adapter, kernel.
    layers, row_bytes
        Layers of the model, and bytes of a row of one of them, padding included.
    shadow_bytes
        Bytes of the key shadow of one chunk in one layer, statistics included, in whole pages; 0
        where none is stored.
    """

    about: str
    layers: int
    row_bytes: int
    shadow_bytes: int

    @classmethod
    def of(
        cls, facts: Mapping[str, object], layers: int, row_bytes: int, shadow_bytes: int
    ) -> Namespace:
        """Return the namespace of some facts, which JSON can say."""
        about = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"))
        return cls(about, layers, row_bytes, shadow_bytes)

    @property
    def digest(self) -> bytes:
        """SHA-256 of all of it, 32 bytes."""
        shape = f"{STORE_VERSION},{self.layers},{self.row_bytes},{self.shadow_bytes}\n"
        return hashlib.sha256(shape.encode() + self.about.encode()).digest()


class Reuse(StrEnum):
    """Where a stored prefix may end."""

    LONGEST = "longest"
    """At any group of 64 tokens: as vLLM's, numbers may be rounded as in another division."""
    EXACT = "exact"
    """At a border of prefill chunks: the bits of a run that computes everything."""


# --- Hashes of prefixes ---


def root_key(namespace: bytes, salt: bytes = b"") -> bytes:
    """Return the key of no tokens at all, which every chain begins with.

    Parameters
    ----------
    namespace
        Digest of a `Namespace`.
    salt
        Of one tenant; what another has stored is never found, not even by its timing.
    """
    return hashlib.sha256(b"hillinfer store %d " % STORE_VERSION + namespace + salt).digest()


def token_words(ids: Sequence[int] | NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return token numbers as they are hashed and stored, uint32.

    Raises
    ------
    OverflowError
        Where one is negative or takes more than 32 bits.
    """
    if not isinstance(ids, np.ndarray):
        # Three times as fast as numpy is with a list, and a lookup waits for it.
        ids = np.frombuffer(array("I", ids), np.uint32)
    return np.ascontiguousarray(ids, TOKEN_TYPE)


def group_keys(before: bytes, ids: Sequence[int] | NDArray[np.uint32]) -> list[bytes]:
    """Return the key of each prefix that ends with a full group of 64 tokens.

    Each is SHA-256 of the key before it and the group's 64 token numbers.

    Parameters
    ----------
    before
        Key of what comes before the first of these tokens: `root_key`, or that of a group.
    ids
        Token numbers from there on; those behind the last full group do not matter.
    """
    data, size = token_words(ids).tobytes(), GROUP_TOKENS * TOKEN_TYPE.itemsize
    keys = []
    for start in range(0, len(data) - size + 1, size):
        before = hashlib.sha256(before + data[start : start + size]).digest()
        keys.append(before)
    return keys
