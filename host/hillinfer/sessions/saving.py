# SPDX-License-Identifier: Apache-2.0
"""Saves a sequence: its rows are given a name or copied, everything else is written."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hillinfer.errors import ColdPoolError
from hillinfer.model_shape import ModelShape
from hillinfer.prompt import PromptForm
from hillinfer.sessions.errors import SessionError
from hillinfer.sessions.fingerprint import Fingerprint
from hillinfer.sessions.manifest import Manifest
from hillinfer.sessions.sequence_parts import extent_of
from hillinfer.sessions.session_files import Part, rows_file
from hillinfer.sessions.session_writer import SessionWriter
from hillinfer.storage.cold_file import ColdFile
from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.group_table import GroupTable
from hillinfer.storage.sequence import Sequence
from hillinfer_model.kernel_spec import GROUP_TOKENS


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


@dataclass(frozen=True)
class RowOwner:
    """Where rows lie and who owns them.

    Parameters
    ----------
    store, groups
        The cold pool.
    """

    store: ColdStore
    groups: GroupTable

    def holds_only(self, sequence: Sequence) -> bool:
        """Whether the files hold this sequence's groups in order, none before, none after."""
        in_order = sequence.groups == list(range(self.groups.groups))
        return in_order and not self.store.has_bases and bool(sequence.groups)


def save_sequence(
    sequence: Sequence,
    rows: RowOwner,
    parts: Iterable[tuple[Part, Iterable[memoryview]]],
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
    rows
        Where its rows lie.
    parts
        What it holds beside them.
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
        if rows.holds_only(sequence):
            fresh = _fresh_files(rows.store, target)
            for file in fresh:
                undo.callback(file.close)
        copied = 0
        for layer in range(shape.layers):
            byte_count = len(sequence.groups) * GROUP_TOKENS * shape.row_bytes
            rows.store.settle_all(layer)
            content = partial(rows.store.groups_in_order, layer, sequence.groups)
            name = rows_file(layer)
            publish = partial(rows.store.publish, layer)
            if not (fresh and writer.link(name, publish, byte_count, content)):
                writer.add(name, content())
                copied += byte_count
        if fresh:
            # Whatever comes now, a file that once had a name is not written to again.
            undo.pop_all()
            rows.store.freeze(len(sequence.groups), fresh)
            rows.groups.seal(len(sequence.groups))
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


def _fresh_files(store: ColdStore, target: Path) -> list[ColdFile]:
    try:
        return store.fresh_files()
    except ColdPoolError as error:
        raise SessionError(f"cannot save the session {target}: {error}") from error
