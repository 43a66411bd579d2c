# SPDX-License-Identifier: Apache-2.0
"""Names and sizes of everything in a session's directory, and what can be wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hillinfer.errors import SHORTAGE, HillInferError, reason_of, way_out
from hillinfer.model_shape import ModelShape
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# --- Errors of saved sessions ---


class SessionError(HillInferError):
    """A session cannot be saved, or what lies in its directory cannot be trusted or used."""


def cannot_save(directory: Path, what: str, error: OSError) -> SessionError:
    """Return the error that says why a session cannot be saved and what to do."""
    fix = way_out(error, "choose another directory with --save-session")
    return SessionError(f"cannot save the session {directory}: {what}: {reason_of(error)}; {fix}")


def cannot_open(directory: Path, what: str, error: OSError) -> SessionError:
    """Return the error that says why something of a session cannot be opened and what to do.

    Where the reason is a shortage of this process, nothing is said about the session.
    """
    fix = way_out(error, "read the document again with --save-session")
    if error.errno in SHORTAGE:
        return SessionError(
            f"the session {directory} cannot be opened now: {what}: {reason_of(error)}; {fix}"
        )
    return SessionError(f"the session {directory} is refused: {what}: {reason_of(error)}; {fix}")


def damaged(directory: Path, what: str) -> SessionError:
    """Return the error that says what is wrong with a saved session."""
    return SessionError(
        f"the session {directory} is refused: {what}; read the document again with --save-session"
    )


def changed_in_use(directory: Path, what: str) -> SessionError:
    """Return the error that says that a session changed under a cache that reads it."""
    return SessionError(
        f"the session {directory} was changed while a cache reads it: {what}; leave its directory "
        "as it is until the cache is closed, and load it again, or read the document again with "
        "--save-session"
    )


# --- Files and their sizes ---

FORMAT_VERSION = 1
MANIFEST_FILE = "session.json"
MOST_LAYERS = 4096
TOKEN_BYTES = 4
HIT_BYTES = 2
CODED_BYTES = 4
QUERY_ITEM_BYTES = 4
CHANNEL_BYTES = 5
# So that direct I/O can read a shadow where it lies.
SLOT_ALIGNMENT = 4096


class Part(StrEnum):
    """The files that are not rows, little-endian and packed."""

    TOKENS = "tokens.bin"
    TAILS = "tails.bin"
    CODED = "coded.bin"
    STATISTICS = "statistics.bin"
    SHADOW = "shadow.bin"
    HITS = "hits.bin"
    OBSERVED = "observed.bin"


def rows_file(layer: int) -> str:
    """Return the name of a layer's rows."""
    return f"rows-{layer:04}.bin"


def slot_bytes(spec: KernelSpec) -> int:
    """Return what one segment's shadow of one layer takes in its file."""
    return -(-spec.segment_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


@dataclass(frozen=True)
class SessionExtent:
    """How much a session holds; every size follows from it.

    Parameters
    ----------
    tokens
        Positions in every layer.
    segments
        Shadow segments that were begun.
    observed_queries
        Last prefill queries of every layer, not yet counted as hits.
    """

    tokens: int
    segments: int
    observed_queries: int

    @property
    def groups(self) -> int:
        """Full groups of rows."""
        return self.tokens // GROUP_TOKENS

    @property
    def open_rows(self) -> int:
        """Rows of the open group."""
        return self.tokens % GROUP_TOKENS

    def file_bytes(self, shape: ModelShape, spec: KernelSpec) -> dict[str, int]:
        """Return the size of every file by its name, the manifest left out."""
        layers = shape.layers
        shadows = self.segments * layers
        channels = spec.kv_heads * spec.head_dim
        queries = self.observed_queries * shape.query_heads * shape.head_dim
        rows = {rows_file(layer): self.groups * GROUP_TOKENS for layer in range(layers)}
        return {
            **{name: count * shape.row_bytes for name, count in rows.items()},
            Part.TOKENS.value: self.tokens * TOKEN_BYTES,
            Part.TAILS.value: layers * self.open_rows * shape.row_bytes,
            Part.CODED.value: shadows * CODED_BYTES,
            Part.STATISTICS.value: shadows * channels * CHANNEL_BYTES,
            Part.SHADOW.value: shadows * slot_bytes(spec),
            Part.HITS.value: layers * self.tokens * HIT_BYTES,
            Part.OBSERVED.value: layers * queries * QUERY_ITEM_BYTES,
        }
