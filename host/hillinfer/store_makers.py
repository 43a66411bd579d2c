# SPDX-License-Identifier: Apache-2.0
"""Shares a store between engines: finds namespaces of the same model that another engine made.

Rows of two makers are rounded otherwise, so each has a namespace of its own. A note in the index
says of a namespace which model its rows are of; another maker that is told to accept them looks
there for rows of the same weights, rotary settings and number type. An index that is made anew has
no notes until each maker opens the store again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hillinfer.errors import HillInferError
from hillinfer.store.database import Database
from hillinfer.store.keys import Namespace
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store_rules import Maker

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
