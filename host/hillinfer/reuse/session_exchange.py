# SPDX-License-Identifier: Apache-2.0
"""Converts stored prefixes to sessions, and densely read sessions to stored prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import SessionError
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.scoring.native import NativeScorer
from hillinfer.sessions.fingerprint import Fingerprint
from hillinfer.sessions.manifest import (
    HIT_BYTES,
    Manifest,
    Part,
    SessionExtent,
    rows_file,
    slot_bytes,
)
from hillinfer.sessions.opening import UNCODED, SavedSession, SavedShadow
from hillinfer.sessions.writing import SessionWriter
from hillinfer.store.keys import CHUNK_TOKENS, Namespace
from hillinfer.store.pool_files import StoreError
from hillinfer.store.prefix import StoredPrefix, WrongBytesError
from hillinfer.store.store import Store
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import CONTRACT_VERSION, GROUP_TOKENS

Progress = Callable[[int], None]


def _unseen(done: int) -> None:
    """Show no progress."""


class _Coder:
    """Makes the key shadow that reading a document densely makes: a whole segment at once.

    Parameters
    ----------
    manifest
        Of the session.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.spec = manifest.spec
        self._scorer = NativeScorer(manifest.spec, Scope.LAYER)
        self._layout = RowLayout(manifest.shape)

    def statistics(self, rows: NDArray[np.uint8], segment: int) -> ChannelStatistics:
        """Return the channel statistics of a whole segment, uint8 (segment_tokens, row_bytes)."""
        return self._scorer.statistics(self._keys(rows), segment * self.spec.segment_tokens, None)

    def shadow(self, rows: NDArray[np.uint8], statistics: ChannelStatistics) -> memoryview:
        """Return the slot of a whole segment in the shadow's file."""
        slot = np.zeros(slot_bytes(self.spec), np.uint8)
        codes = slot[: self.spec.segment_bytes].reshape(self.spec.segment_beats, -1)
        self._scorer.encode(self._keys(rows), statistics, codes, 0)
        return slot.data

    def _keys(self, rows: NDArray[np.uint8]) -> torch.Tensor:
        keys = self._layout.keys(torch.from_numpy(rows))
        return keys if keys.dtype is torch.float16 else keys.half()


# --- From a store to a session ---


@dataclass(frozen=True)
class Exported:
    """What was written as a session.

    Parameters
    ----------
    tokens, byte_count
        Of the session; all of its files.
    """

    tokens: int
    byte_count: int


def export_session(
    found: StoredPrefix,
    target: Path,
    fingerprint: Fingerprint,
    on_progress: Progress = _unseen,
) -> Exported:
    """Write a stored prefix as a session; it stays stored.

    Parameters
    ----------
    found
        What to write, of the model's namespace.
    target
        The session's directory, which must not exist, or be empty.
    fingerprint
        Of the model, and of how the session codes keys.
    on_progress
        Called with how many tokens are done.

    Raises
    ------
    StoreError
        Where its bytes are wrong.
    SessionError
        Where the session cannot be written; nothing is left then.
    """
    with SessionWriter(target) as writer:
        manifest = Manifest(
            fingerprint=fingerprint,
            extent=SessionExtent(found.tokens, found.tokens // CHUNK_TOKENS, 0),
            # Neither is asked of a session whose document is given too.
            chunk_tokens=None,
            prompt_form=None,
            digests=writer.digests,
        )
        try:
            for part, pieces in _parts(found, manifest, on_progress):
                writer.add(part, pieces)
        except (OSError, WrongBytesError) as error:
            raise StoreError(f"what is stored cannot be read: {error}") from error
        writer.finish(manifest)
        return Exported(found.tokens, writer.byte_count)


def _parts(
    found: StoredPrefix, manifest: Manifest, on_progress: Progress
) -> Iterator[tuple[str, Iterable[memoryview]]]:
    """Yield every file and its bytes, in pieces, each valid until the next."""
    layers, coder = manifest.shape.layers, _Coder(manifest)
    whole = range(manifest.extent.segments)
    taken: dict[tuple[int, int], ChannelStatistics] = {}

    def rows(layer: int) -> Iterator[memoryview]:
        for number, own in enumerate(_chunks(found, layer)):
            if number in whole:
                taken[number, layer] = coder.statistics(own, number)
            yield own.reshape(-1).data
        on_progress((layer + 1) * found.tokens // layers)

    def shadows() -> Iterator[memoryview]:
        for layer in range(layers):
            for number, own in enumerate(_chunks(found, layer)):
                if number in whole:
                    yield coder.shadow(own, taken[number, layer])

    for layer in range(layers):
        yield rows_file(layer), rows(layer)
    ids = np.concatenate(
        [one.sheet.ids[: one.groups * GROUP_TOKENS] for one in found.chunks]
    ).astype("<i4")
    yield Part.TOKENS, iter([_bytes(ids)])
    yield Part.TAILS, iter(())
    coded = np.full((len(whole), layers), coder.spec.segment_tokens, "<i4")
    yield Part.CODED, iter([_bytes(coded)])
    own = [taken[number, layer] for number in whole for layer in range(layers)]
    yield (
        Part.STATISTICS,
        (_bytes(part) for one in own for part in (one.exponents, one.means.astype("<i4"))),
    )
    yield Part.SHADOW, shadows()
    hits = np.zeros(found.tokens * HIT_BYTES, np.uint8)
    yield Part.HITS, (_bytes(hits) for _ in range(layers))
    yield Part.OBSERVED, iter(())


def _chunks(found: StoredPrefix, layer: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the rows of each chunk in a layer, valid until the next."""
    shape = found.shape
    memory = aligned_buffer(shape.object_bytes)[: shape.object_bytes]
    rows = memory.reshape(CHUNK_TOKENS, shape.row_bytes)
    for chunk in found.chunks:
        own = rows[: chunk.groups * GROUP_TOKENS]
        found.read_groups(chunk, layer, 0, own)
        yield own


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# --- From a session to a store ---


@dataclass(frozen=True)
class Imported:
    """What was stored of a session.

    Parameters
    ----------
    tokens, dense_tokens
        Of the session, and how many of its first ones were read densely, in whole groups.
    found_tokens, stored_tokens
        How many of those were stored before, and how many more are now.
    """

    tokens: int
    dense_tokens: int
    found_tokens: int
    stored_tokens: int


def import_session(
    store: Store,
    session: SavedSession,
    namespace: Namespace,
    salt: bytes = b"",
    on_progress: Progress = _unseen,
) -> Imported:
    """Store what a session read densely; the session stays as it is.

    Parameters
    ----------
    store
        Open.
    session
        Open; it is verified.
    namespace
        Of the model that the session fits.
    salt
        Of the tenant who is to find it.
    on_progress
        Called with how many tokens are stored.

    Raises
    ------
    SessionError
        Where it is not as it was written, or no group of its tokens was surely read densely.
    """
    session.verify()
    dense = dense_tokens(session)
    if not dense:
        raise SessionError(
            f"the session {session.directory} holds no {GROUP_TOKENS} tokens that were surely read "
            "densely, and rows of answers are not stored: read the document with hillinfer store "
            "put"
        )
    shape, ids = session.manifest.shape, session.token_ids()[:dense]
    found = store.find(namespace, ids, salt)
    before = 0 if found is None else found.tokens
    writer = store.writer(namespace, ids, found, salt)
    try:
        done = before
        if writer is not None:
            # What computing them took nobody says: what others of the same model took counts.
            writer.cost_per_group = store.seconds_per_group(namespace) or None
            for start, stop in _pieces(before, dense):
                if writer.is_ended:
                    break
                for layer in range(shape.layers):
                    rows = _rows(shape, stop - start)
                    session.read_rows(layer, start, rows)
                    writer.write(layer, start // GROUP_TOKENS, rows)
                writer.publish(stop)
                on_progress(stop)
            done = writer.published_tokens
    finally:
        if writer is not None:
            writer.close()
        if found is not None:
            found.close()
    return Imported(session.tokens, dense, before, max(0, done - before))


def dense_tokens(session: SavedSession) -> int:
    """Return how many first tokens of a session were surely read densely, in whole groups.

    Decoding codes the keys of an open segment and takes its statistics from the tokens that are
    there by then. Reading densely takes them from whole segments. So the first segment whose
    statistics are not those of all its keys shows where decoding began at the latest. The group
    before it is left out, whose last token may have been the first to be decoded.

    Parameters
    ----------
    session
        Verified.

    Raises
    ------
    SessionError
        Where it was coded by another version of the scoring contract, and nobody can tell.
    """
    manifest, tokens = session.manifest, session.tokens
    if manifest.fingerprint.contract_version != CONTRACT_VERSION:
        raise SessionError(
            f"the session {session.directory} does not fit: contract version is "
            f"{manifest.fingerprint.contract_version} in the session and {CONTRACT_VERSION} here; "
            "read the document with hillinfer store put"
        )
    shadow, coder = SavedShadow(session), _Coder(manifest)
    size = coder.spec.segment_tokens
    whole = next(
        (one for one in range(tokens // size) if not _is_dense(session, shadow, coder, one)), None
    )
    if whole is None:
        last = tokens // size
        if last >= len(shadow.coded) or (shadow.coded[last] == UNCODED).all():
            # Where nobody said how it was read, a last token that filled a segment shows nothing.
            unsaid = manifest.chunk_tokens is None and tokens % size == 0
            return max(0, tokens - GROUP_TOKENS * unsaid) // GROUP_TOKENS * GROUP_TOKENS
        whole = last
    return max(0, whole * size - GROUP_TOKENS)


def _is_dense(session: SavedSession, shadow: SavedShadow, coder: _Coder, segment: int) -> bool:
    """Say whether the statistics of a whole segment are those of all its keys."""
    size = coder.spec.segment_tokens
    if segment >= len(shadow.coded) or (shadow.coded[segment] != size).any():
        return False
    rows = _rows(session.manifest.shape, size)
    for layer in range(session.manifest.shape.layers):
        session.read_rows(layer, segment * size, rows)
        own, kept = coder.statistics(rows, segment), shadow.statistics(segment, layer)
        if (
            kept is None
            or not np.array_equal(own.exponents, kept.exponents)
            or not np.array_equal(own.means, kept.means)
        ):
            return False
    return True


def _rows(shape: ModelShape, tokens: int) -> NDArray[np.uint8]:
    """Return page-aligned memory for rows."""
    size = tokens * shape.row_bytes
    return aligned_buffer(size)[:size].reshape(tokens, shape.row_bytes)


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield where each chunk of a prompt begins and ends, from some token on."""
    while start < stop:
        end = min(start // CHUNK_TOKENS * CHUNK_TOKENS + CHUNK_TOKENS, stop)
        yield start, end
        start = end
