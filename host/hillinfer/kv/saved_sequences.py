# SPDX-License-Identifier: Apache-2.0
"""Saves a sequence as a session, and takes one up again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import ColdFile
from hillinfer.drive.regions import GroupTable
from hillinfer.errors import ColdPoolError, SessionError
from hillinfer.generate.prompt import PromptForm
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.sequence import Sequence
from hillinfer.model_shape import ModelShape
from hillinfer.sessions.fingerprint import Fingerprint
from hillinfer.sessions.manifest import (
    CHANNEL_BYTES,
    HIT_BYTES,
    WORTH_BYTES,
    Manifest,
    Part,
    SessionExtent,
    damaged,
    rows_file,
    slot_bytes,
)
from hillinfer.sessions.opening import NOT_TAKEN, UNCODED, SavedSession, SavedShadow
from hillinfer.sessions.writing import CodesBeside, SessionWriter
from hillinfer.shadow.kept_codes import KeptCodes
from hillinfer.shadow.segments import SegmentLayer
from hillinfer.shadow.values import MOST_WORTH, ValueCodes
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS

if TYPE_CHECKING:
    from hillinfer.kv.sequence_shadows import SequenceShadows

# --- what a session's files hold ---

# Of each segment what each layer has; None where a layer has not begun it.
_Segments = list[list[SegmentLayer | None]]


def extent_of(sequence: Sequence) -> SessionExtent:
    """Return how much a session of this sequence holds."""
    queries = {0 if one is None else len(one) for one in _observed_of(sequence)}
    return SessionExtent(
        tokens=len(sequence.token_ids),
        segments=max(len(own.segments) for own in sequence.bands()),
        # Queries count once, in all layers of a step; without those of one layer none matter.
        observed_queries=queries.pop() if len(queries) == 1 else 0,
    )


def parts_of(
    sequence: Sequence, shape: ModelShape, shadow: SequenceShadows
) -> Iterator[tuple[Part, Iterator[memoryview]]]:
    """Yield every part and its bytes, in pieces, each valid until the next.

    Parameters
    ----------
    sequence
        What to save; all of its bands have all tokens.
    shape
        The model's.
    shadow
        Keeps the sequence's shadow.
    """
    extent, layers = extent_of(sequence), range(shape.layers)
    # A copy: an array that others look into cannot grow, and a held error looks into it.
    yield Part.TOKENS, iter([_bytes(np.array(sequence.token_ids, "<i4"))])
    tails = (sequence.of(layer).tails[layer] for layer in layers)
    yield Part.TAILS, (_bytes(tail[: extent.open_rows]) for tail in tails)
    made = [
        [
            own.segments[number].layers[layer] if number < len(own.segments) else None
            for layer in layers
            for own in [sequence.of(layer)]
        ]
        for number in range(extent.segments)
    ]
    yield Part.CODED, iter([_bytes(_coded(made))])
    channels = shape.kv_heads * shape.head_dim
    taken = [None if one is None else one.statistics for one in chain.from_iterable(made)]
    yield Part.STATISTICS, _statistics(taken, channels, 0)
    taken = [
        None if one is None or one.values is None else one.values.statistics
        for one in chain.from_iterable(made)
    ]
    if any(one is not None for one in taken):
        yield Part.VALUES, _statistics(taken, channels, NOT_TAKEN)
        if shadow.values is not None:
            yield Part.WANTED, _wanted(sequence, shape, extent.tokens, shadow.values)
    yield Part.SHADOW, _shadow(sequence, extent.segments, shape, shadow)
    yield Part.HITS, _hits(sequence, shape, extent.tokens)
    yield Part.OBSERVED, _observed(sequence) if extent.observed_queries else iter(())


def fill_sequence(saved: SavedSession, sequence: Sequence, tokens: int, most_queries: int) -> None:
    """Put back what a sequence kept beside rows and shadow.

    Parameters
    ----------
    saved
        Verified.
    sequence
        With room for the hits of `tokens`.
    tokens
        How many of the session's tokens it takes; the queries come back only with all of them, and
        of the session's open group what they reach.
    most_queries
        Last prefill queries of a layer that there is room for.
    """
    extent, shape = saved.manifest.extent, saved.manifest.shape
    for layer, counts in enumerate(sequence.hits.counts):
        own = np.empty(tokens, "<u2")
        saved.read_into(Part.HITS, own.view(np.uint8), layer * extent.tokens * HIT_BYTES)
        counts[:tokens] = own
    full = extent.tokens - extent.open_rows
    for layer, tail in enumerate(sequence.tails if tokens > full else ()):
        open_rows = tail[: tokens - full]
        saved.read_into(Part.TAILS, open_rows, layer * tail[: extent.open_rows].nbytes)
    if tokens < extent.tokens:
        return
    if extent.observed_queries and most_queries:
        size = (shape.layers, extent.observed_queries, shape.query_heads, shape.head_dim)
        queries = saved.array(Part.OBSERVED, "<f4", size)
        if not np.isfinite(queries).all():
            raise damaged(saved.directory, f"{Part.OBSERVED.value} holds queries without end")
        sequence.observed = [torch.from_numpy(own[-most_queries:].copy()) for own in queries]


def recall_codes(saved: SavedSession, sequence: Sequence, values: ValueCodes) -> None:
    """Go on from how often codes of a session's tokens were wanted, where it says so.

    Parameters
    ----------
    saved
        Verified.
    sequence
        Whose full groups it has.
    values
        Keeps codes.

    Raises
    ------
    SessionError
        Where what it says is nothing that a run would have saved.
    """
    if Part.WANTED.value not in saved.manifest.digests:
        return
    rows = sequence.rows(np.arange(sequence.group_count * GROUP_TOKENS))
    for layer in range(saved.manifest.shape.layers):
        worth = np.empty(len(rows), "<f2")
        place = layer * saved.tokens * WORTH_BYTES
        saved.read_into(Part.WANTED, worth.view(np.uint8), place)
        if not ((worth >= 0) & (worth <= MOST_WORTH)).all():
            raise damaged(saved.directory, f"{Part.WANTED.value} holds what no token is worth")
        values.recall(layer, rows, worth)


def bring_codes(saved: SavedShadow, sequence: Sequence, codes: KeptCodes) -> None:
    """Go on with a session's statistics of values, and with codes of them where it has these.

    Where codes cannot be read any more the user is warned, and they are made of rows later.

    Parameters
    ----------
    saved
        Verified.
    sequence
        Whose segments it has, and full groups.
    codes
        Keeps them.
    """
    size, settled = saved.session.manifest.spec.segment_tokens, sequence.group_count * GROUP_TOKENS
    has_codes = saved.session.has_codes
    codes.make_room(int(sequence.rows(np.arange(settled)).max(initial=-1)) + 1)
    for layer in range(len(sequence.tails)):
        for number, segment in enumerate(sequence.segments):
            own, statistics = segment.layers[layer], saved.values(number, layer)
            if own.statistics is None or statistics is None:
                continue
            rows = sequence.rows(np.arange(number * size, min((number + 1) * size, settled)))
            own.values = codes.numbered(layer, rows, statistics)
            codes.lack(own.values)
            if has_codes:
                read = partial(saved.value_codes, layer, number * size, len(rows))
                try:
                    codes.bring(layer, rows, own.values, read)
                except (SessionError, ColdPoolError):
                    has_codes = False
                    saved.session.warn_of_codes("cannot be read any more")


def _coded(made: _Segments) -> NDArray[np.int32]:
    return np.array(
        [
            [UNCODED if own is None or own.statistics is None else own.coded_tokens for own in one]
            for one in made
        ],
        "<i4",
    )


def _statistics(
    taken: list[ChannelStatistics | None], channels: int, missing: int
) -> Iterator[memoryview]:
    for own in taken:
        if own is None:
            yield memoryview(bytes([missing]) * (channels * CHANNEL_BYTES))
        else:
            yield _bytes(own.exponents)
            yield _bytes(own.means.astype("<i4"))


def _shadow(
    sequence: Sequence, segments: int, shape: ModelShape, shadow: SequenceShadows
) -> Iterator[memoryview]:
    for layer in range(shape.layers):
        made = shadow.shadows(layer, sequence.of(layer))
        padding = slot_bytes(shadow.spec) - shadow.spec.segment_bytes
        for segment in made:
            yield _bytes(segment.shadow)
            yield memoryview(bytes(padding))
        for _ in range(segments - len(made)):
            yield memoryview(bytes(slot_bytes(shadow.spec)))


def _hits(sequence: Sequence, shape: ModelShape, tokens: int) -> Iterator[memoryview]:
    for layer in range(shape.layers):
        counts = sequence.of(layer).hits.counts[layer]
        own = np.zeros(tokens, "<u2")
        own[: len(counts)] = counts[:tokens]
        yield _bytes(own)


def _wanted(
    sequence: Sequence, shape: ModelShape, tokens: int, values: ValueCodes
) -> Iterator[memoryview]:
    for layer in range(shape.layers):
        own = sequence.of(layer)
        worth = np.zeros(tokens, "<f2")
        rows = own.rows(np.arange(own.group_count * GROUP_TOKENS))
        worth[: len(rows)] = values.worth(layer, rows)
        yield _bytes(worth)


def _observed_of(sequence: Sequence) -> list[torch.Tensor | None]:
    return [sequence.of(layer).observed[layer] for layer in range(len(sequence.observed))]


def _observed(sequence: Sequence) -> Iterator[memoryview]:
    for queries in _observed_of(sequence):
        assert isinstance(queries, torch.Tensor)
        yield _bytes(queries.contiguous().numpy().astype("<f4"))


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# --- saving ---

# Coded at once: that fits the caches of a core.
_CODED_TOKENS = 4 * GROUP_TOKENS


@dataclass(frozen=True)
class SessionOrigin:
    """Where a session comes from, as its manifest keeps it.

    Parameters
    ----------
    fingerprint
        Of the model and the settings, weights included.
    chunk_tokens, prompt_form
        As in `Manifest`.
    """

    fingerprint: Fingerprint
    chunk_tokens: int | None = None
    prompt_form: PromptForm | None = None


@dataclass(frozen=True)
class SavedBytes:
    """What saving a session took.

    Parameters
    ----------
    byte_count
        Size of all files.
    copied_row_bytes
        Bytes of rows that were written again, because the files of the cold pool lie on another
        file system or hold something else too.
    """

    byte_count: int
    copied_row_bytes: int


def value_coder(
    sequence: Sequence, shape: ModelShape, shadow: SequenceShadows
) -> CodesBeside | None:
    """Return what codes values while rows are written; None where a session has no codes."""
    values, segments = shadow.values, [one for own in sequence.bands() for one in own.segments]
    has_any = any(one.values is not None for segment in segments for one in segment.layers)
    if values is None or not has_any or not sequence.groups:
        return None
    made = values

    def code(layer: int, first: int, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        number = first // shadow.spec.segment_tokens
        known = sequence.of(layer).segments[number : number + 1]
        own = known[0].layers[layer].values if known else None
        if own is None:
            return np.zeros((len(rows), made.coder.row_bytes), np.uint8)
        return made.encode(shadow.value_part.of(rows), own)

    return CodesBeside(code, shape.row_bytes, min(_CODED_TOKENS, shadow.spec.segment_tokens))


def save_sequence(
    sequence: Sequence,
    store: ColdStore,
    groups: GroupTable,
    parts: Iterable[tuple[Part, Iterable[memoryview]]],
    coder: CodesBeside | None,
    shape: ModelShape,
    target: Path,
    origin: SessionOrigin,
    calls: DriveCalls | None = None,
) -> SavedBytes:
    """Save a sequence of whole tokens.

    The cold pool goes on as before, but never writes again to files that the session has.

    Parameters
    ----------
    sequence
        What to save.
    store, groups
        The cold pool, where its rows lie.
    parts
        What it holds beside them.
    coder
        Codes values; None where the session has no codes of them.
    shape
        The model's.
    target
        The session's directory, which must not exist.
    origin
        What the manifest says about it.
    calls
        How the drive is reached; the operating system itself where None.

    Raises
    ------
    SessionError
        Where it cannot be saved; nothing is left then, and the sequence is as before.
    ColdPoolError
        Where its rows cannot be read back.
    """
    if not sequence.token_ids:
        raise SessionError(
            f"cannot save the session {target}: the cache holds no tokens; read a document first"
        )
    with SessionWriter(target, calls) as writer, ExitStack() as undo:
        fresh: list[ColdFile] = []
        if _holds_only(store, groups, sequence):
            fresh = _fresh_files(store, target)
            undo.callback(_close_unused, store, fresh)
        copied = 0
        with ExitStack() as adding:
            take = adding.enter_context(writer.adding(Part.CODES.value)) if coder else None
            for layer in range(shape.layers):
                numbers = sequence.of(layer).groups
                byte_count = len(numbers) * GROUP_TOKENS * shape.row_bytes
                store.settle_all(layer)
                content = partial(store.groups_in_order, layer, numbers)
                if coder is not None and take is not None:
                    content = partial(coder.pieces, layer, content, take)
                name = rows_file(layer)
                publish = partial(store.publish, layer)
                if not (fresh and writer.link(name, publish, byte_count, content)):
                    writer.add(name, content())
                    copied += byte_count
        if fresh:
            # Whatever comes now, a file that once had a name is not written to again. Sealed first:
            # Ctrl-C in between leaves groups that nobody writes to, in files as before.
            groups.seal(len(sequence.groups))
            store.freeze(len(sequence.groups), fresh)
        for part, pieces in parts:
            writer.add(part.value, pieces)
        writer.finish(
            Manifest(
                fingerprint=origin.fingerprint,
                extent=extent_of(sequence),
                chunk_tokens=origin.chunk_tokens,
                prompt_form=origin.prompt_form,
                digests=dict(writer.digests),
            )
        )
        return SavedBytes(writer.byte_count, copied)


def _holds_only(store: ColdStore, groups: GroupTable, sequence: Sequence) -> bool:
    """Whether the cold pool's files hold a sequence's groups in order, none before, none after."""
    if store.pages.are_sealed:
        # Nobody could read them once this process has ended.
        return False
    in_order = sequence.groups == list(range(groups.groups)) and not sequence.deeper
    return in_order and not store.others.are_used and bool(sequence.groups)


def _close_unused(store: ColdStore, fresh: list[ColdFile]) -> None:
    """Close files that a cold pool does not go on with."""
    used = {id(file) for file in store.files}
    for file in fresh:
        if id(file) not in used:
            file.close()


def _fresh_files(store: ColdStore, target: Path) -> list[ColdFile]:
    try:
        return store.fresh_files()
    except ColdPoolError as error:
        raise SessionError(f"cannot save the session {target}: {error}") from error
