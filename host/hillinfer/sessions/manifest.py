# SPDX-License-Identifier: Apache-2.0
"""What a session says about itself, in one small JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from hillinfer.generate.prompt import PromptForm
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.sessions.files import (
    FORMAT_VERSION,
    MOST_LAYERS,
    SessionError,
    SessionExtent,
    damaged,
)
from hillinfer.sessions.fingerprint import Fingerprint
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import KernelSpec

# --- The manifest ---

MOST_BYTES = 4 << 20
_MOST_TOKENS = 1 << 40
_MOST_QUERIES = 1 << 16
_DIGEST_LENGTH = 64
_MOST_TEXT = 65_536


@dataclass(frozen=True)
class Manifest:
    """A session's description; nothing in it names a file that is not known beforehand.

    Parameters
    ----------
    fingerprint
        What the session is used with; its weights are known.
    extent
        How much it holds.
    chunk_tokens
        Tokens of a forward pass that read the document; None where that is not known.
    prompt_form
        How the document became a prompt; None where it was saved from Python.
    digests
        SHA-256 of every other file, by name.
    """

    fingerprint: Fingerprint
    extent: SessionExtent
    chunk_tokens: int | None
    prompt_form: PromptForm | None
    digests: dict[str, str]

    @property
    def shape(self) -> ModelShape:
        """Shape of the cache; its positions are those of the session."""
        own = self.fingerprint
        return ModelShape(
            layers=own.layers,
            kv_heads=own.kv_heads,
            query_heads=own.query_heads,
            head_dim=own.head_dim,
            stored_type=StoredType(own.stored_type),
            max_positions=self.extent.tokens,
        )

    @property
    def spec(self) -> KernelSpec:
        """What fixes the layout of the shadow."""
        shape = self.shape
        return KernelSpec(
            head_dim=shape.head_dim,
            kv_heads=shape.kv_heads,
            group_size=shape.group_size,
            key_mode=self.shadow,
            segment_tokens=self.fingerprint.segment_tokens,
        )

    @property
    def shadow(self) -> KeyMode:
        """Number format of the key shadow."""
        return KeyMode(self.fingerprint.shadow)

    @property
    def file_bytes(self) -> dict[str, int]:
        """Size of every file by its name, the manifest left out."""
        return self.extent.file_bytes(self.shape, self.spec)

    def as_bytes(self) -> bytes:
        """Return the content of the manifest's file: canonical JSON with a digest of itself."""
        content = {
            "format_version": FORMAT_VERSION,
            "fingerprint": asdict(self.fingerprint),
            "extent": asdict(self.extent),
            "chunk_tokens": self.chunk_tokens,
            "prompt_form": self.prompt_form.value if self.prompt_form else None,
            "digests": self.digests,
        }
        return sealed(content)

    @classmethod
    def parse(cls, data: bytes, directory: Path) -> Manifest:
        """Read a manifest and refuse everything that `as_bytes` would not have written.

        Parameters
        ----------
        data
            Content of the file.
        directory
            The session's, for messages.

        Raises
        ------
        SessionError
            With the reason.
        """
        try:
            content = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise damaged(directory, f"its manifest is no JSON ({error})") from error
        if not isinstance(content, dict):
            raise damaged(directory, "its manifest is no JSON object")
        version = content.get("format_version")
        if type(version) is int and version != FORMAT_VERSION:
            raise SessionError(
                f"the session {directory} does not fit: format version is {version} in the session "
                f"and {FORMAT_VERSION} here; read the document again with --save-session"
            )
        content.pop("manifest_digest", None)
        try:
            whole = sealed(content)
        except (ValueError, RecursionError) as error:
            raise damaged(directory, f"its manifest is no plain JSON ({error})") from error
        if whole != data:
            raise damaged(directory, "its manifest was changed: its digest does not fit")
        try:
            return cls._checked(content)
        except (ValueError, TypeError, KeyError) as error:
            raise damaged(directory, f"its manifest makes no sense ({error!s:.200})") from error

    @classmethod
    def _checked(cls, content: dict[str, Any]) -> Manifest:
        known = {"format_version", *(field.name for field in fields(cls))}
        if content.keys() != known:
            raise ValueError(f"it has {', '.join(sorted(content))}")
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version is {content['format_version']!r}")
        chunk, form = content["chunk_tokens"], content["prompt_form"]
        manifest = cls(
            fingerprint=_fingerprint(content["fingerprint"]),
            extent=_extent(content["extent"]),
            chunk_tokens=None if chunk is None else _number("chunk_tokens", chunk, 1),
            prompt_form=None if form is None else PromptForm(form),
            digests=content["digests"],
        )
        most = -(-manifest.extent.tokens // manifest.fingerprint.segment_tokens)
        _number("segments", manifest.extent.segments, 0, most)
        sizes = manifest.file_bytes
        if not isinstance(manifest.digests, dict) or manifest.digests.keys() != sizes.keys():
            raise ValueError("digests do not name the files of such a session")
        for name, digest in manifest.digests.items():
            _digest(name, digest)
        return manifest


def sealed(content: dict[str, Any]) -> bytes:
    """Return what a manifest's file holds: JSON content with its own digest."""
    text = json.dumps(content, sort_keys=True, indent=1, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    sealed = {**content, "manifest_digest": digest}
    return json.dumps(sealed, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"


def _fingerprint(content: Any) -> Fingerprint:
    own = _object("fingerprint", content, [field.name for field in fields(Fingerprint)])
    fingerprint = Fingerprint(
        contract_version=_number("contract_version", own["contract_version"], 0),
        segment_tokens=_number("segment_tokens", own["segment_tokens"], 1),
        layers=_number("layers", own["layers"], 1, MOST_LAYERS),
        kv_heads=_number("kv_heads", own["kv_heads"], 1),
        query_heads=_number("query_heads", own["query_heads"], 1),
        head_dim=_number("head_dim", own["head_dim"], 1),
        compute_type=_text("compute_type", own["compute_type"]),
        stored_type=StoredType(own["stored_type"]).value,
        rotary=_text("rotary", own["rotary"]),
        config=_digest("config", own["config"]),
        shadow=KeyMode(own["shadow"]).value,
        tokenizer=None if own["tokenizer"] is None else _digest("tokenizer", own["tokenizer"]),
        weights=_digest("weights", own["weights"]),
    )
    if fingerprint.query_heads % fingerprint.kv_heads:
        raise ValueError("query_heads is no multiple of kv_heads")
    return fingerprint


def _extent(content: Any) -> SessionExtent:
    own = _object("extent", content, [field.name for field in fields(SessionExtent)])
    return SessionExtent(
        tokens=_number("tokens", own["tokens"], 1),
        segments=_number("segments", own["segments"], 0),
        observed_queries=_number("observed_queries", own["observed_queries"], 0, _MOST_QUERIES),
    )


def _object(name: str, content: Any, keys: list[str]) -> dict[str, Any]:
    if not isinstance(content, dict) or sorted(content) != sorted(keys):
        raise ValueError(f"{name} has other fields")
    return content


def _number(name: str, value: Any, low: int, high: int = _MOST_TOKENS) -> int:
    # A bool is an int in Python, and not here.
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r:.40}, not a number in {low}..{high}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ValueError(f"{name} is no text")
    return value


def _digest(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) != _DIGEST_LENGTH:
        raise ValueError(f"{name} has no SHA-256")
    return value


# --- Reusable tokens ---


def reusable_tokens(
    saved_ids: Sequence[int],
    ids: Sequence[int],
    chunk_tokens: int,
    segment_tokens: int,
    unread_tokens: int = 0,
) -> int:
    """Return how many of a session's first tokens a document is read on from.

    All where the documents are equal, else those of whole segments in common, down to the border of
    a chunk: the rest is then read in the same chunks as without a session, and every bit is equal.

    Parameters
    ----------
    saved_ids, ids
        Of the saved document and of the new one.
    chunk_tokens
        Tokens of one forward pass of reading.
    segment_tokens
        Tokens that share channel statistics.
    unread_tokens
        Tokens at the end that must be read in any case.
    """
    if not unread_tokens and list(saved_ids) == list(ids):
        return len(ids)
    pairs = zip(saved_ids, ids[: len(ids) - unread_tokens], strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    whole = common // segment_tokens * segment_tokens
    return whole // chunk_tokens * chunk_tokens
