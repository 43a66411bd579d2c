# SPDX-License-Identifier: Apache-2.0
"""Namespaces of a store: what it holds of each, and those of the same model by another maker.

Rows of two makers are rounded otherwise, so each has a namespace of its own. A note in the index
says of a namespace which model its rows are of; another maker that is told to accept them looks
there for rows of the same weights, rotary settings and number type. An index that is made anew has
no notes until each maker opens the store again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import HillInferError, reason_of
from hillinfer.store.database import Database, State
from hillinfer.store.extent import read_sheets
from hillinfer.store.keys import CHUNK_TOKENS, UNIT_BYTES, ExtentShape, Namespace
from hillinfer.store.maintenance import chain_of, chunks_of
from hillinfer.store.pool_files import Span, StoreError, place_of
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store.retirement import used_bytes
from hillinfer.store.store import Store
from hillinfer.store_rules import Maker
from hillinfer_model.kernel_spec import GROUP_TOKENS

# --- What is held of each, and the tokens of a stored prompt ---

# As `StoredChain` has them.
_NAME_DIGITS = 12


@dataclass(frozen=True)
class Holding:
    """What a store holds of one namespace.

    Parameters
    ----------
    namespace
        The first digits of its digest.
    chunks, tokens
        That can be found.
    row_bytes, waste_bytes
        Bytes of their rows, shadows and codes, and of what is left empty in their extents.
    pinned_bytes
        How many of the rows' bytes stay where room is short.
    """

    namespace: str
    chunks: int
    tokens: int
    row_bytes: int
    waste_bytes: int
    pinned_bytes: int


def holdings(database: Database, tag_bytes: int = 0) -> list[Holding]:
    """Return what is held of each namespace, the most bytes first; `tag_bytes` are the store's."""
    rows = database.rows(
        "SELECT n.digest, c.pinned <> 0, count(*), sum(c.groups), c.units, n.layers, n.row_bytes, "
        "n.shadow_bytes FROM chunk c JOIN namespace n ON n.id = c.namespace "
        f"WHERE c.state = {State.READY:d} GROUP BY n.id, c.units, c.pinned <> 0"
    )
    held: dict[bytes, Holding] = {}
    for digest, is_pinned, chunks, groups, units, *sizes in rows:
        own = used_bytes(tag_bytes, chunks, groups, units, *sizes)
        before = held.get(digest) or Holding(digest.hex()[:_NAME_DIGITS], 0, 0, 0, 0, 0)
        held[digest] = replace(
            before,
            chunks=before.chunks + chunks,
            tokens=before.tokens + groups * GROUP_TOKENS,
            row_bytes=before.row_bytes + own,
            waste_bytes=before.waste_bytes + chunks * units * UNIT_BYTES - own,
            pinned_bytes=before.pinned_bytes + is_pinned * own,
        )
    return sorted(held.values(), key=lambda one: one.row_bytes, reverse=True)


def token_ids(store: Store, name: str) -> list[int]:
    """Return the token numbers of a stored prefix.

    Parameters
    ----------
    store
        Open, with its key where it is encrypted.
    name
        First digits of its key, as `chains` gives them.

    Raises
    ------
    StoreError
        Where nothing, or more than one, is called so, or a chunk is not as it was written.
    """
    return _ids_of(store, chunks_of(store.database, name)[::-1], f"'{name}'")


def prefix_ids(store: Store, key: bytes) -> list[int]:
    """Return the token numbers of a stored prefix by its key, whether others go on from it or not.

    Parameters
    ----------
    store
        Open, with its key where it is encrypted.
    key
        Of all its tokens, as `StoredPrompts.stored_key` gives it.

    Raises
    ------
    StoreError
        Where it is not stored any more, or a chunk is not as it was written.
    """
    rows = store.database.rows(
        "SELECT p.chunk, p.groups, c.position FROM prefix p JOIN chunk c ON c.id = p.chunk "
        f"WHERE p.hash = ? AND c.state = {State.READY:d}",
        (key,),
    )
    if not rows:
        raise StoreError("its rows are gone from the store")
    last, groups, position = rows[0]
    ids = _ids_of(store, chain_of(store.database, last)[::-1], "it")
    return ids[: position * CHUNK_TOKENS + groups * GROUP_TOKENS]


def _ids_of(store: Store, numbers: Sequence[int], what: str) -> list[int]:
    """Return the token numbers of chunks, the first one first; `what` they are is for errors."""
    found: list[int] = []
    for position, number in enumerate(numbers):
        rows = store.database.rows(
            "SELECT c.drive, c.unit, c.units, c.key, n.layers, n.row_bytes, n.shadow_bytes "
            "FROM chunk c JOIN namespace n ON n.id = c.namespace "
            "WHERE c.id = ? AND c.position = ?",
            (number, position),
        )
        if not rows:
            raise StoreError(
                f"{what} cannot be read: what it begins with was damaged or has gone; read the "
                "prompt again, or remove it with hillinfer store rm"
            )
        ((drive, unit, units, key, *sizes),) = rows
        span = Span(drive, unit, units)
        shape = replace(ExtentShape(*sizes), tag_bytes=store.keys.tag_bytes)
        data = aligned_buffer(shape.sheets_bytes)
        try:
            store.files[drive].read(data, span.offset)
        except OSError as error:
            raise StoreError(f"{what} cannot be read: {reason_of(error)}") from error
        place = place_of(span, store.places.pool)
        sheets = read_sheets(data, shape, place, store.keys)
        own = [sheet for _, sheet in sheets if sheet.header.key == key]
        if not own:
            raise StoreError(f"{what} is not whole: run hillinfer store verify")
        found += own[0].ids[: own[0].header.groups * GROUP_TOKENS].tolist()
    return found


# --- Those of the same model that another engine made ---

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_HASHING_THREADS = 4
# Of a config, what says nothing about how keys and values are computed, or stands elsewhere here.
UNTOLD = frozenset(
    {
        *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
        *("_name_or_path", "_model_name_or_path", "_attn_implementation", "model_type"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "initializer_range"),
        *("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"),
        *("pretraining_tp", "chunk_size_feed_forward", "output_attentions", "return_dict"),
    }
)
# Both engines turn the same pairs of channels of these, and store keys behind that.
_FAMILIES = frozenset({"llama"})
# Others turn keys by how long contexts may get, of which two engines may say different things.
_ROTARY = frozenset({"default", "linear", "llama3"})
_NOTE = "maker "


class UnlikeRowsError(HillInferError):
    """Rows of this model are those of no other maker; the message says why."""


@dataclass(frozen=True)
class RowKind:
    """What has to be the same in both makers of rows.

    Parameters
    ----------
    weights
        Digest of the files that the model was loaded from, its config among them.
    rotary
        How keys are turned, as canonical JSON.
    row_type
        Number type of rows.
    layers, kv_heads, head_dim
        Of the model; a row is K of all KV heads behind their rotation, then V, 64-byte padded.
    """

    weights: str
    rotary: str
    row_type: str
    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, directory: Path, config: Mapping[str, Any], row_type: str) -> RowKind:
        """Return the kind of the rows of a model that was loaded from a directory.

        Parameters
        ----------
        directory
            With its weights and `config.json`.
        config
            The model's as it is in memory.
        row_type
            Number type of its rows, like `bfloat16`.

        Raises
        ------
        UnlikeRowsError
            Where its rows are not to be compared with another maker's.
        """
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise UnlikeRowsError(
                f"rows of '{family}' models were not compared between engines yet: "
                f"{', '.join(sorted(_FAMILIES))} models were"
            )
        files = weight_files(directory)
        own = directory / "config.json"
        if not files or not own.is_file():
            raise UnlikeRowsError(
                f"no weights and config.json in {directory}: load the model from its directory"
            )
        said = json.loads(own.read_text())
        for name in sorted((said.keys() & config.keys()) - UNTOLD):
            if said[name] != config[name]:
                raise UnlikeRowsError(
                    f"'{name}' is {config[name]} in memory and {said[name]} in {own}"
                )
        heads = int(config["num_attention_heads"])
        return cls(
            weights=files_digest([own, *files]),
            rotary=_rotary(config),
            row_type=row_type,
            layers=int(config["num_hidden_layers"]),
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        )


@dataclass(frozen=True)
class Accepted:
    """What may be read of another maker.

    Parameters
    ----------
    namespaces
        Of its rows, the last noted first.
    refused
        Why rows that it has of the same weights are not taken; empty where nothing is refused.
    """

    namespaces: tuple[Namespace, ...] = ()
    refused: str = ""


def note_maker(database: Database, maker: Maker, kind: RowKind, namespace: Namespace) -> None:
    """Say in a store's index which model a namespace's rows are of, for other makers."""
    told = {"maker": maker, "kind": asdict(kind), "namespace": asdict(namespace)}
    name = _NOTE + namespace.digest.hex()
    said = json.dumps(told, sort_keys=True)
    if database.note(name) != said:
        database.set_notes({name: said})


def accepted(database: Database, maker: Maker, kind: RowKind, like: Namespace) -> Accepted:
    """Return the namespaces of another maker's rows of the same model.

    Parameters
    ----------
    database
        Of the store's index.
    maker
        Whose rows are wanted.
    kind, like
        Of those that who asks makes itself.
    """
    found: list[Namespace] = []
    types: set[str] = set()
    query = "SELECT value FROM meta WHERE name >= ? AND name < ? ORDER BY name"
    for (said,) in database.rows(query, (_NOTE, _NOTE + "~")):
        try:
            told = json.loads(said)
            other, space = RowKind(**told["kind"]), Namespace(**told["namespace"])
        except (TypeError, KeyError, ValueError):
            # Of a version that says more of its rows: nobody knows here whether that matters.
            continue
        if told.get("maker") != maker:
            continue
        if other == kind and (space.layers, space.row_bytes) == (like.layers, like.row_bytes):
            found.append(space)
        elif replace(other, row_type=kind.row_type) == kind:
            types.add(other.row_type)
    if found or not types:
        return Accepted(tuple(found))
    return Accepted(
        refused=f"rows of {maker} are {', '.join(sorted(types))} and those of this model "
        f"{kind.row_type}: load both in one type"
    )


def is_of(prefix: StoredPrefix, namespace: Namespace) -> bool:
    """Return whether a found prefix has the rows of a namespace, and not of an accepted one."""
    return prefix.chunks[0].sheet.header.namespace == namespace.digest


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a directory that have a model's or an adapter's weights."""
    return sorted(path for pattern in WEIGHTS for path in directory.glob(pattern))


def files_digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 over names and contents of files."""
    paths = list(files)
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        digests = list(threads.map(_file_digest, paths))
    named = [f"{path.name} {digest}\n" for path, digest in zip(paths, digests, strict=True)]
    return hashlib.sha256("".join(named).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return hashlib.sha256().hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return hashlib.sha256(content).hexdigest()


def _rotary(config: Mapping[str, Any]) -> str:
    """Return how keys are turned, the same for both ways in which configs say it."""
    told = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(told.pop("rope_type", None) or told.pop("type", None) or "default")
    if kind not in _ROTARY:
        raise UnlikeRowsError(f"keys are turned by '{kind}', which may hang on lengths")
    theta = told.pop("rope_theta", None) or config.get("rope_theta")
    told.pop("type", None)
    partial = told.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    said = {"type": kind, "theta": theta, "partial": float(partial or 1), **told}
    return json.dumps(said, sort_keys=True, default=str)
