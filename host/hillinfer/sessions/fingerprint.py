# SPDX-License-Identifier: Apache-2.0
"""What a session's rows and codes depend on: it is used with the same or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from hillinfer.errors import SessionError
from hillinfer.model_shape import ModelShape
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import CONTRACT_VERSION, KernelSpec

# --- The fingerprint ---

# Of a value in a message; a session's may be of any length.
_MOST_SHOWN = 400
_OWN_MODEL = "load the model that the session was saved with, --model"
_ROTARY = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_dim",
    "max_position_embeddings",
)
# Of a config, what says nothing about how keys and values are computed.
_NO_MATTER = frozenset(
    {
        *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
        *("output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id"),
        *("problem_type", "initializer_range", "chunk_size_feed_forward", "pretraining_tp"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id"),
        *("quantization_config", "tie_word_embeddings"),
    }
)
FIXES = {
    "contract_version": "read the document again with --save-session",
    "segment_tokens": "read the document again with --save-session",
    "layers": _OWN_MODEL,
    "kv_heads": _OWN_MODEL,
    "query_heads": _OWN_MODEL,
    "head_dim": _OWN_MODEL,
    "compute_type": "choose the session's type with --dtype",
    "stored_type": "choose the session's type with --dtype",
    "rotary": _OWN_MODEL,
    "config": _OWN_MODEL,
    "tokenizer": "use the tokenizer and chat template that the session was saved with",
    "shadow": "choose the session's shadow with --shadow, or leave --shadow out",
    "weights": _OWN_MODEL,
}


@dataclass(frozen=True)
class Fingerprint:
    """Everything that must be equal where a session is used again.

    Parameters
    ----------
    contract_version, segment_tokens
        Of the scoring contract: what codes mean and what shares statistics.
    layers, kv_heads, query_heads, head_dim
        The model's shape.
    compute_type, stored_type
        The model's number type, and that of rows.
    rotary
        Position settings of the model's config, as canonical JSON.
    config
        SHA-256 of what else the config says about computing.
    shadow
        Number format of the key shadow.
    tokenizer
        SHA-256 of tokenizer and chat template; None where none was named.
    weights
        SHA-256 of all weights; None where they are not loaded yet.
    """

    contract_version: int
    segment_tokens: int
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    compute_type: str
    stored_type: str
    rotary: str
    config: str
    shadow: str
    tokenizer: str | None
    weights: str | None

    @classmethod
    def of(cls, config: Any, dtype: Any, shadow: KeyMode, tokenizer: Any = None) -> Fingerprint:
        """Take all that needs no weights.

        Config and tokenizer are those of transformers; the model computes in `dtype`.
        """
        shape = ModelShape.from_config(config, dtype)
        spec = KernelSpec(shape.head_dim, shape.kv_heads, shape.group_size, key_mode=shadow)
        settings = config.to_dict()
        rotary = {name: settings.pop(name) for name in _ROTARY if name in settings}
        computing = {
            name: value
            for name, value in settings.items()
            if name not in _NO_MATTER and not name.startswith("_")
        }
        return cls(
            contract_version=CONTRACT_VERSION,
            segment_tokens=spec.segment_tokens,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            query_heads=shape.query_heads,
            head_dim=shape.head_dim,
            compute_type=str(dtype).removeprefix("torch."),
            stored_type=shape.stored_type.value,
            rotary=_canonical(rotary),
            config=_sha256(_canonical(computing)),
            shadow=shadow.value,
            tokenizer=None if tokenizer is None else tokenizer_digest(tokenizer),
            weights=None,
        )

    def check(self, found: Fingerprint, directory: Path) -> None:
        """Refuse to use a session with something else than it was saved with.

        What either side does not know, a tokenizer or weights, is not compared.

        `directory` is the session's, whose fingerprint this is; for the message. Raises
        SessionError for the first field that differs, with both values and the fix.
        """
        for field in fields(self):
            own, other = getattr(self, field.name), getattr(found, field.name)
            if own is not None and other is not None and own != other:
                raise SessionError(
                    f"the session {directory} does not fit: {field.name.replace('_', ' ')} is "
                    f"{own!s:.{_MOST_SHOWN}} in the session and {other!s:.{_MOST_SHOWN}} here; "
                    f"{FIXES[field.name]}"
                )


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256 of what turns text into ids: the tokenizer and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        content = json.loads(backend.to_str())
        # How the last call padded and cut, which belongs to the call.
        content.pop("padding", None)
        content.pop("truncation", None)
    template = getattr(tokenizer, "chat_template", None)
    return _sha256(_canonical({"tokenizer": content, "chat_template": template}))


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- The digest of weights ---

_MOST_THREADS = 8


def weights_digest(model: Any) -> str:
    """Return the SHA-256 over name, shape, type and bytes of every weight, in name order.

    Weights that share their memory are read once. Works in threads: hashing runs without Python's
    lock. The model is a torch module with its weights in memory.
    """
    state = sorted(model.state_dict().items())
    places: dict[tuple[Any, ...], torch.Tensor] = {_place(weight): weight for _, weight in state}
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        digests = dict(zip(places, threads.map(bytes_digest, places.values()), strict=True))
    whole = hashlib.sha256()
    for name, weight in state:
        line = f"{name} {tuple(weight.shape)} {weight.dtype} {digests[_place(weight)]}\n"
        whole.update(line.encode())
    return whole.hexdigest()


def _place(weight: torch.Tensor) -> tuple[Any, ...]:
    return (weight.device, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)


def bytes_digest(weight: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in the order of its elements, as hex digits."""
    flat = weight.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


# --- The model at hand ---


class ModelIdentity:
    """Fingerprints of one loaded model; its weights are read at most once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights: str | None = None

    def without_weights(self, shadow: KeyMode, tokenizer: Any = None) -> Fingerprint:
        """Return what is known at once; parameters as in `Fingerprint.of`."""
        return Fingerprint.of(self._model.config, self._model.dtype, shadow, tokenizer)

    def fingerprint(self, shadow: KeyMode, tokenizer: Any = None) -> Fingerprint:
        """Return the whole fingerprint; parameters as in `Fingerprint.of`."""
        if self._weights is None:
            self._weights = weights_digest(self._model)
        return replace(self.without_weights(shadow, tokenizer), weights=self._weights)
