# SPDX-License-Identifier: Apache-2.0
"""What a session's directory holds and says about itself, and what can be wrong with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any

from hillinfer.errors import SessionError
from hillinfer.generate.prompt import PromptForm
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.sessions.fingerprint import Fingerprint
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.value_layout import code_row_bytes

# --- What can be wrong ---


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
WORTH_BYTES = 2
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
    # Statistics of values, only where tokens were coded.
    VALUES = "values.bin"
    # How often and how lately each token was wanted as a coded one, likewise.
    WANTED = "wanted.bin"
    # Codes of values of full groups, likewise: rows have all that these have.
    CODES = "codes.bin"


def rows_file(layer: int) -> str:
    """Return the name of a layer's rows."""
    return f"rows-{layer:04}.bin"


def slot_bytes(spec: KernelSpec) -> int:
    """Return what one segment's shadow of one layer takes in its file."""
    return -(-spec.segment_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def code_bytes(spec: KernelSpec) -> int:
    """Return what a token's value codes of one layer take: a code row and its exponents."""
    return code_row_bytes(spec) + spec.kv_heads


@dataclass(frozen=True)
class SessionExtent:
    """How much a session holds; every size follows from it.

    `segments` counts shadow segments that were begun, `observed_queries` the last prefill queries
    of every layer, not yet counted as hits.
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
        sizes = self.extent.file_bytes(self.shape, self.spec)
        settled = self.extent.groups * GROUP_TOKENS
        coded = {
            Part.VALUES.value: sizes[Part.STATISTICS.value],
            Part.WANTED.value: self.shape.layers * self.extent.tokens * WORTH_BYTES,
            Part.CODES.value: self.shape.layers * settled * code_bytes(self.spec),
        }
        # Sessions that were saved before there was one, or without codes, open without.
        return sizes | {name: size for name, size in coded.items() if name in self.digests}

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

        `directory` is the session's, for messages. Raises SessionError with the reason.
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
        named = isinstance(manifest.digests, dict)
        if not named or manifest.digests.keys() != manifest.file_bytes.keys():
            raise ValueError("digests do not name the files of such a session")
        if Part.CODES.value in manifest.digests and Part.VALUES.value not in manifest.digests:
            raise ValueError("codes of values have no statistics")
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
    `chunk_tokens` are those of one forward pass of reading, `segment_tokens` those that share
    channel statistics, and `unread_tokens` at the end must be read in any case.
    """
    if not unread_tokens and list(saved_ids) == list(ids):
        return len(ids)
    pairs = zip(saved_ids, ids[: len(ids) - unread_tokens], strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    whole = common // segment_tokens * segment_tokens
    return whole // chunk_tokens * chunk_tokens
