# SPDX-License-Identifier: Apache-2.0
"""JSON files of models, read in bounded time and memory, and the settings in them checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hillinfer.errors import ModelError
from hillinfer.values import format_bytes

# --- JSON files ---

# Libraries copy what they read, a microsecond or a few for each value and each copy.
_MOST_VALUES = 1 << 20


def read_json_object(
    file: Path, most_bytes: int, most_values: int = _MOST_VALUES
) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    A file with more than `most_bytes` is refused unread; one with more than `most_values` values,
    lists and objects before any of them is made. Raises ModelError where it cannot be read, is too
    large, has too many values, is no UTF-8, no JSON or no object, is nested too deeply, names a key
    twice, or holds a number that is not finite.
    """
    return _read_object(file, most_bytes, most_values, _strict)


def check_size(file: Path, most_bytes: int) -> None:
    """Raise ModelError for what is no ordinary file, or larger than it may be."""
    try:
        found = file.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    if not file.is_file():
        raise ModelError(f"cannot read {file}: it is not an ordinary file")
    if found > most_bytes:
        raise ModelError(
            f"{file} has {format_bytes(found)}, and such a file has {format_bytes(most_bytes)} at "
            "most: it is not what it should be, get the model anew"
        )


def check_values(file: Path, text: str, most: int) -> None:
    """Raise ModelError for a text of more than `most` commas and opening brackets.

    Each value has one or more of them.
    """
    found = sum(text.count(letter) for letter in ",[{")
    if found > most:
        raise ModelError(
            f"{file} has {found} values, and such a file has {most} at most: it is not what it "
            "should be, get the model anew"
        )


def _read_object(
    file: Path, most_bytes: int, most_values: int, parse: Callable[[str], Any]
) -> dict[str, Any]:
    """Read an object in bounded time; `parse` raises ValueError where a text is no JSON."""
    check_size(file, most_bytes)
    try:
        text = file.read_text(encoding="utf-8")
        check_values(file, text, most_values)
        content = parse(text)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except RecursionError as error:
        raise ModelError(f"cannot read {file}: it is nested too deeply") from error
    except ValueError as error:
        raise ModelError(f"cannot read {file}: it is not JSON in UTF-8 ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"cannot read {file}: it is not a JSON object")
    return content


def _strict(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once, parse_constant=_refused, parse_float=_finite)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"'{name[:80]}' is there twice")
        content[name] = value
    return content


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


# --- `tokenizer.json` ---

_MOST_BYTES = 64 << 20
# Four times those of the largest of today, with 262,144 tokens and 514,906 merges.
_MOST_TOKENIZER_VALUES = 1 << 23
# Bytes of text that one byte may become, counted as if every step met its worst letter. Those of
# real tokenizers come to 72: Unicode takes letters apart, and spaces become marks.
_MOST_GROWTH = 1000.0
_MOST_ADDED = 1 << 16
_UNICODE_GROWTH = {"NFD": 4.0, "NFKD": 18.0, "NFC": 3.0, "NFKC": 18.0, "Precompiled": 18.0}
_PARTS = ("normalizer", "decoder")


def check_tokenizer(file: Path) -> None:
    """Refuse a `tokenizer.json` that makes far more text than it is given.

    Its normalizer and its decoder are small programs. Eight replacements of a letter by fifty, one
    after the other, make more text of one letter than any memory holds, in native code that then
    ends the process.

    Raises ModelError then, and where the file is no JSON object or has too many values.
    """
    content = _read_object(file, _MOST_BYTES, _MOST_TOKENIZER_VALUES, json.loads)
    for part in _PARTS:
        growth = _growth(content.get(part))
        if growth > _MOST_GROWTH:
            raise ModelError(
                f"cannot use {file}: its {part} makes up to {growth:.3g} bytes of one, and "
                f"{_MOST_GROWTH:.0f} are the most: it is not what it should be, get the model anew"
            )


def _growth(step: Any) -> float:
    """Return how many bytes one byte may become; what is no step is the library's to refuse."""
    growth, waiting = 1.0, [step]
    while waiting and growth <= _MOST_GROWTH:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        for name in ("normalizers", "decoders"):
            nested = one.get(name)
            waiting += nested if isinstance(nested, list) else []
        growth *= _growth_of_one(one)
    return growth


def _growth_of_one(step: dict[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), _bytes(step.get("content"))
        literal = _bytes(pattern.get("String")) if isinstance(pattern, dict) else 0
        # A regular expression may match nothing at all, before every letter.
        return max(1.0, content / literal) if literal else 1.0 + content
    if kind == "Prepend":
        # Once for a text, which is one letter at least.
        added = _bytes(step.get("prepend"))
        return 1.0 if added <= _MOST_ADDED else float(added)
    return _UNICODE_GROWTH.get(str(kind), 1.0)


def _bytes(text: Any) -> int:
    return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0


# --- Numbers within bounds ---

_MOST_LETTERS = 60


def wrong_setting(name: str, value: Any, where: object, reason: str) -> ModelError:
    """Return the error of a setting; its value is written only now, since it may be long."""
    return ModelError(f"{where} has {name}={repr(value)[:_MOST_LETTERS]} in its config{reason}")


def check_whole(name: str, value: Any, low: int, high: int, where: object) -> None:
    """Raise ModelError for what is no whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong_setting(name, value, where, f": it is {low} to {high}")


def check_number(name: str, value: Any, low: float, high: float, where: object) -> None:
    """Raise ModelError for what is no number from `low` to `high`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise wrong_setting(name, value, where, f": it is {low:g} to {high:g}")


# --- Rotary positions ---

ROTARY = ("rope_scaling", "rope_parameters")
# Far beyond any model: what is larger leaves positions that are all the same.
_LARGE = 1e6
# What transformers' rope types read, whichever of them (`transformers.modeling_rope_utils`).
_ROTARY_RANGES = {
    "factor": (1.0, _LARGE),
    "attention_factor": (1e-6, _LARGE),
    "beta_fast": (0.0, _LARGE),
    "beta_slow": (0.0, _LARGE),
    "low_freq_factor": (1e-6, _LARGE),
    "high_freq_factor": (1e-6, _LARGE),
    "mscale": (0.0, _LARGE),
    "mscale_all_dim": (0.0, _LARGE),
}
# Of LongRoPE, one number for each pair of a head's dimensions; real ones are a little below 1, too.
_LISTS = ("short_factor", "long_factor")
_ELEMENTS = (1e-6, _LARGE)
# Smaller first; a missing one or 0 is what transformers takes then.
_ORDERED = (("low_freq_factor", "high_freq_factor", 0.0, _LARGE), ("beta_slow", "beta_fast", 1, 32))


def check_rotary(name: str, value: Any, where: object) -> None:
    """Refuse rotary parameters that no positions can be computed from.

    `value` is what is under `rope_scaling` or `rope_parameters`: the parameters, or those of each
    type of layer by its name. Raises ModelError for the first that is of the wrong type or out of
    range.
    """
    if not isinstance(value, Mapping):
        return
    _check_parameters(name, value, where)
    for kind, own in value.items():
        if isinstance(own, Mapping):
            _check_parameters(f"{name}.{kind!s:.40}", own, where)


def _check_parameters(name: str, own: Mapping[str, Any], where: object) -> None:
    for key, bounds in _ROTARY_RANGES.items():
        if own.get(key) is not None:
            check_number(f"{name}.{key}", own[key], *bounds, where)
    for key in _LISTS:
        if own.get(key) is not None:
            _check_list(f"{name}.{key}", own[key], where)
    if own.get("truncate") is not None and not isinstance(own["truncate"], bool):
        raise wrong_setting(f"{name}.truncate", own["truncate"], where, ": it is true or false")
    for low, high, least, most in _ORDERED:
        smaller, larger = own.get(low) or least, own.get(high) or most
        if smaller > larger:
            raise wrong_setting(
                f"{name}.{low}", smaller, where, f", above its {high}={larger}: they are swapped"
            )
    short, long = (own.get(key) for key in _LISTS)
    if short and long and len(short) != len(long):
        raise wrong_setting(
            f"{name}.short_factor", short, where,
            f": it has {len(short)} numbers, and long_factor {len(long)}",
        )  # fmt: skip


def _check_list(name: str, value: Any, where: object) -> None:
    # One number alone would be used for every dimension without a word.
    if not isinstance(value, list) or len(value) < 2:
        raise wrong_setting(name, value, where, ": it is a list of a number for each frequency")
    for place, one in enumerate(value):
        check_number(f"{name}[{place}]", one, *_ELEMENTS, where)


# --- A model's settings ---

# Far above any model that there is; what is built from more takes minutes or all memory.
_LAYERS, _HEADS, _WIDTH, _POSITIONS = 1024, 4096, 1 << 20, 1 << 28
_MOST = {
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "n_layer": _LAYERS,
    "n_layers": _LAYERS,
    "encoder_layers": _LAYERS,
    "decoder_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "n_head": _HEADS,
    "head_dim": _HEADS,
    "num_experts": _HEADS,
    "num_local_experts": _HEADS,
    "n_routed_experts": _HEADS,
    "hidden_size": _WIDTH,
    "n_embd": _WIDTH,
    "word_embed_proj_dim": _WIDTH,
    "intermediate_size": 8 * _WIDTH,
    "ffn_dim": 8 * _WIDTH,
    "vocab_size": 1 << 24,
    "max_position_embeddings": _POSITIONS,
    "n_positions": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
}
# Lists of these lengths are made from numbers alone, before any part of the model is built. None is
# allowed, so what is subtracted from the layers adds none.
_MOST_OR_NONE = {
    "num_labels": 1 << 16,
    "num_classes": 1 << 16,
    "first_k_dense_replace": _LAYERS,
    "num_hash_layers": _LAYERS,
    "num_mtp_layers": _LAYERS,
    "num_nextn_predict_layers": _LAYERS,
    "num_residual_layers": _LAYERS,
    "num_layers_per_stack": _LAYERS,
    "H_cycles": _LAYERS,
    "L_cycles": _LAYERS,
}
_REPEATED = "attention_types"
# Values that decide what is computed: outside of these nothing but NaN comes out.
_RANGES = {
    "rms_norm_eps": (0.0, 1.0),
    "layer_norm_eps": (0.0, 1.0),
    "layer_norm_epsilon": (0.0, 1.0),
    "rope_theta": (1e-6, 1e15),
    "partial_rotary_factor": (0.0, 1.0),
}
_ANY_WHOLE = 1 << 53
# Caches compute with these, and not every family's config looks at their types.
_WINDOWS = ("sliding_window", "attention_chunk_size")
_REFUSED = {
    "quantization_config": "its weights are quantised in a format of their own, and HillInfer "
    "reads float weights and GGUF files: give the model that it was quantised from, or a GGUF file",
    "transformers_weights": "it names other files for its weights: remove that line, and call the "
    "weights model.safetensors",
    "fusion_config": "it changes what its layers are made of: remove that line",
}
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")


def check_settings(settings: Mapping[str, Any], where: object) -> None:
    """Refuse settings that no model has.

    They are those of a model's `config.json`, or the same of a GGUF file; `where` is for the
    message. Raises ModelError for the first setting that is of the wrong type or out of range, that
    would have other files or code used, or that does not fit another.
    """
    for name, reason in _REFUSED.items():
        if settings.get(name) is not None:
            raise ModelError(f"{where} has {name} in its config: {reason}")
    for name, value in _every(settings):
        _check_one(name, value, where)
    _check_heads(settings, where)


def _every(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value with the name that it is under, those of nested objects and lists too."""
    waiting: list[tuple[str, Any]] = [("", settings)]
    while waiting:
        name, content = waiting.pop()
        if isinstance(content, Mapping):
            waiting += [(str(key), value) for key, value in content.items()]
        elif isinstance(content, list):
            waiting += [("", value) for value in content]
        if name:
            yield name, content
        elif isinstance(content, int | float):
            yield "an element", content


def _check_one(name: str, value: Any, where: object) -> None:
    if value is not None:
        if name in _MOST:
            check_whole(name, value, 1, _MOST[name], where)
        if name in _MOST_OR_NONE:
            check_whole(name, value, 0, _MOST_OR_NONE[name], where)
        if name in _RANGES:
            check_number(name, value, *_RANGES[name], where)
        if name in _WINDOWS and not isinstance(value, int):
            raise wrong_setting(name, value, where, ": it is a whole number or null")
        if name in ROTARY:
            check_rotary(name, value, where)
        if name == _REPEATED and isinstance(value, list):
            _check_repeated(name, value, where)
    if isinstance(value, int) and abs(value) > _ANY_WHOLE:
        raise wrong_setting(name, value, where, ": it is too large a number")
    if name in _ATTENTION and isinstance(value, str) and "/" in value:
        raise wrong_setting(name, value, where, ", which is code of a hub: remove that line")


def _check_repeated(name: str, value: Any, where: object) -> None:
    """Refuse lists that are repeated far too often: GPT-Neo's [[["global", "local"], 12]]."""
    layers = 0
    for kinds, times in (one[:2] for one in value if isinstance(one, list) and len(one) > 1):
        length = len(kinds) if isinstance(kinds, list | str | Mapping) else 1
        layers += length * times if isinstance(times, int) and times > 0 else 0
    if layers > _LAYERS:
        raise wrong_setting(name, value, where, f", which is {layers} layers, above {_LAYERS}")


def _check_heads(settings: Mapping[str, Any], where: object) -> None:
    heads, kv_heads = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ModelError(
            f"{where} has num_attention_heads={heads} in its config, no multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    width = settings.get("hidden_size")
    if heads and width and settings.get("head_dim") is None and width % heads:
        raise ModelError(
            f"{where} has hidden_size={width} in its config, no multiple of "
            f"num_attention_heads={heads}, and no head_dim"
        )
