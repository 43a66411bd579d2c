# SPDX-License-Identifier: Apache-2.0
"""Prompts, rows and namespaces that the tests of the store have in common."""

import hashlib

import numpy as np

from hillinfer.drive.files import aligned_buffer
from hillinfer.store.keys import Namespace

GROUP = 64
MIB = 1 << 20


def namespace(layers=3, row_bytes=256, shadow_bytes=4096, **facts):
    """Return a namespace of a tiny model."""
    return Namespace.of({"weights": "0" * 64, **facts}, layers, row_bytes, shadow_bytes)


def prompt(seed, tokens):
    """Return token numbers; the first ones of a longer prompt of the same seed are the same."""
    return np.random.default_rng(seed).integers(0, 49152, tokens).tolist()


def rows_of(space, ids, layer, first, stop):
    """Return rows of groups as they would be computed: each follows from all tokens so far."""
    out = aligned_buffer((stop - first) * GROUP * space.row_bytes)
    out = out[: (stop - first) * GROUP * space.row_bytes].reshape(-1, space.row_bytes)
    for group in range(first, stop):
        before = np.asarray(ids[: (group + 1) * GROUP], "<u4").tobytes()
        seed = hashlib.sha256(before + bytes([layer]) + space.about.encode()).digest()[:8]
        numbers = np.random.default_rng(int.from_bytes(seed, "little"))
        own = slice((group - first) * GROUP, (group - first + 1) * GROUP)
        out[own] = numbers.integers(0, 256, (GROUP, space.row_bytes), np.uint8)
    return out


def shadow_of(space, ids, layer, position):
    """Return the shadow of a chunk in a layer."""
    last = rows_of(space, ids, layer, 16 * position + 15, 16 * position + 16)
    out = aligned_buffer(space.shadow_bytes)
    out[:] = np.resize(last, space.shadow_bytes)
    return out


def put(store, space, ids, tokens=None, step=512, salt=b"", turn=0):
    """Read a prompt as a model would: what is stored is found, the rest is made and stored."""
    tokens = len(ids) if tokens is None else tokens
    with_found = store.find(space, ids[:tokens], salt)
    writer = store.writer(space, ids[:tokens], with_found, salt, turn)
    done = 0 if with_found is None else with_found.tokens
    if writer is not None:
        while done < tokens // GROUP * GROUP and not writer.is_ended:
            stop = min(done // step * step + step, tokens // GROUP * GROUP)
            for layer in range(space.layers):
                groups = done // GROUP, stop // GROUP
                writer.write(layer, groups[0], rows_of(space, ids, layer, *groups))
                for position in range(done // 1024, stop // 1024):
                    if space.shadow_bytes:
                        writer.write_shadow(layer, position, shadow_of(space, ids, layer, position))
            writer.publish(stop)
            done = stop
        writer.close()
    if with_found is not None:
        with_found.close()
    return done


def check(store, space, ids, salt=b""):
    """Return how many tokens of a prompt are found; all their bytes are as they would be made."""
    found = store.find(space, ids, salt)
    if found is None:
        return 0
    with found:
        seen = 0
        for layer, position, rows in found.stream():
            first = position // GROUP
            wanted = rows_of(space, ids, layer, first, first + len(rows) // GROUP)
            np.testing.assert_array_equal(rows, wanted)
            seen += len(rows)
        assert seen == found.tokens * space.layers
        for number, chunk in enumerate(found.chunks):
            if chunk.sheet.header.has_shadow and chunk.groups == 16:
                for layer in range(space.layers):
                    shadow = aligned_buffer(space.shadow_bytes)
                    found.read_shadow(chunk, layer, shadow)
                    np.testing.assert_array_equal(shadow, shadow_of(space, ids, layer, number))
        return found.tokens
