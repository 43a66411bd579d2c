# SPDX-License-Identifier: Apache-2.0
"""Prompts whose rows follow from their tokens, so that what a store gives back can be judged."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.store.keys import CHUNK_GROUPS, CHUNK_TOKENS, Namespace
from hillinfer.store.store import Store
from hillinfer_model.kernel_spec import GROUP_TOKENS

_VOCABULARY = 49152
# Words of 64 bits in a SHA-256.
_HASH_WORDS = 4

TokenNumbers = Sequence[int] | NDArray[np.uint32]


def namespace(
    layers: int = 3, row_bytes: int = 256, shadow_bytes: int = 4096, **facts: object
) -> Namespace:
    """Return a namespace of a tiny model."""
    return Namespace.of({"weights": "0" * 64, **facts}, layers, row_bytes, shadow_bytes)


def prompt(seed: int, tokens: int) -> list[int]:
    """Return token numbers; a longer prompt of the same seed begins with them."""
    found: list[int] = np.random.default_rng(seed).integers(0, _VOCABULARY, tokens).tolist()
    return found


@functools.cache
def _noise(byte_count: int) -> NDArray[np.uint64]:
    """Return random words, as many in a row as a hash has, so that places of a group differ."""
    words = np.random.default_rng(0).integers(0, 1 << 64, byte_count // 8, np.uint64)
    words.flags.writeable = False
    return words.reshape(-1, _HASH_WORDS)


def rows_of(
    space: Namespace, ids: TokenNumbers, layer: int, first: int, stop: int
) -> NDArray[np.uint8]:
    """Return rows of some groups as they would be computed: each follows from all tokens so far.

    Page-aligned, uint8 (groups * 64, row_bytes).
    """
    size = (stop - first) * GROUP_TOKENS * space.row_bytes
    out = aligned_buffer(size)[:size].reshape(-1, space.row_bytes)
    words = np.asarray(ids[: stop * GROUP_TOKENS], "<u4")
    noise = _noise(GROUP_TOKENS * space.row_bytes)
    # Goes on from group to group, because hashing all tokens anew for each takes long.
    before = hashlib.sha256(words[: first * GROUP_TOKENS].tobytes())
    for group in range(first, stop):
        before.update(words[group * GROUP_TOKENS : (group + 1) * GROUP_TOKENS].tobytes())
        hashed = before.copy()
        hashed.update(bytes([layer]) + space.about.encode())
        own = slice((group - first) * GROUP_TOKENS, (group - first + 1) * GROUP_TOKENS)
        words_of_group = out[own].reshape(-1).view(np.uint64).reshape(-1, _HASH_WORDS)
        np.bitwise_xor(noise, np.frombuffer(hashed.digest(), np.uint64), out=words_of_group)
    return out


def shadow_of(space: Namespace, ids: TokenNumbers, layer: int, position: int) -> NDArray[np.uint8]:
    """Return the shadow of a chunk in a layer, page-aligned, uint8 (shadow_bytes,)."""
    group = CHUNK_GROUPS * (position + 1) - 1
    out = aligned_buffer(space.shadow_bytes)
    out[:] = np.resize(rows_of(space, ids, layer, group, group + 1), space.shadow_bytes)
    return out


def put(
    store: Store,
    space: Namespace,
    ids: Sequence[int],
    tokens: int | None = None,
    step: int = 512,
    salt: bytes = b"",
    turn: int = 0,
    extra_bytes: int = 0,
) -> int:
    """Read a prompt as a model would: what is stored is found, the rest is made and stored.

    Returns how many tokens can be found afterwards, as far as the writer knows.

    Parameters
    ----------
    store, space, ids, salt, turn, extra_bytes
        As in `Store.writer`.
    tokens
        How many of the prompt's; all where None.
    step
        Tokens of a pass.
    """
    count = len(ids) if tokens is None else tokens
    last = count // GROUP_TOKENS * GROUP_TOKENS
    found = store.find(space, ids[:count], salt)
    done = 0 if found is None else found.tokens
    writer = store.writer(space, ids[:count], found, salt, turn, extra_bytes=extra_bytes)
    words = np.asarray(ids[:last], np.uint32)
    if writer is not None:
        begun = done
        while begun < last and not writer.is_ended:
            stop = min(begun // step * step + step, last)
            for layer in range(space.layers):
                first = begun // GROUP_TOKENS
                rows = rows_of(space, words, layer, first, stop // GROUP_TOKENS)
                writer.write(layer, first, rows)
                for position in range(begun // CHUNK_TOKENS, stop // CHUNK_TOKENS):
                    if space.shadow_bytes:
                        shadow = shadow_of(space, words, layer, position)
                        writer.write_shadow(layer, position, shadow)
            writer.publish(stop)
            begun = stop
        writer.close()
        done = writer.published_tokens
    if found is not None:
        found.close()
    return done


class WrongTokensError(Exception):
    """A store gave bytes back that are not those of the prompt."""


def check(store: Store, space: Namespace, ids: Sequence[int], salt: bytes = b"") -> int:
    """Return how many tokens of a prompt are found.

    Raises
    ------
    WrongTokensError
        Where any byte is not as it would be made.
    """
    found = store.find(space, ids, salt)
    if found is None:
        return 0
    with found:
        seen, words = 0, np.asarray(ids, np.uint32)
        for layer, position, rows in found.stream():
            first = position // GROUP_TOKENS
            stop = first + len(rows) // GROUP_TOKENS
            if not np.array_equal(rows, rows_of(space, words, layer, first, stop)):
                raise WrongTokensError(f"rows of layer {layer} from {position} on")
            seen += len(rows)
        if seen != found.tokens * space.layers:
            raise WrongTokensError(f"{seen} rows for {found.tokens} tokens")
        whole = [
            number
            for number, chunk in enumerate(found.chunks)
            if chunk.sheet.header.has_shadow and chunk.groups == CHUNK_GROUPS
        ]
        for number, shadows in found.shadows(whole):
            for layer, shadow in enumerate(shadows):
                if not np.array_equal(shadow, shadow_of(space, words, layer, number)):
                    raise WrongTokensError(f"shadow of layer {layer} of chunk {number}")
        return found.tokens
