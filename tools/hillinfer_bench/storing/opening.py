# SPDX-License-Identifier: Apache-2.0
"""What opening a long stored prefix takes: its sheets and key shadows, while its rows stay."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from hillinfer.drive.files import aligned_buffer
from hillinfer.store.keys import CHUNK_TOKENS, ExtentShape, Namespace
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import prompt
from hillinfer_bench.storing.speed import SHAPES, read_all, read_plainly
from hillinfer_model.kernel_spec import GROUP_TOKENS

_SHAPE = "llama-3.1-8b"
# Codes of 4 bits take an eighth of the bytes of rows.
_SHADOW_PART = 8
_ALLOWED_SECONDS = 0.05


@dataclass(frozen=True)
class OpenRow:
    """Opening a stored prefix, beside streaming it and reading the drive plainly.

    Parameters
    ----------
    tokens, layers, shadow_bytes, row_bytes
        What was stored, in all.
    open_seconds
        Of each round, by a store that was just opened: looking up, comparing all tokens, and
        reading all shadows, compared with their checksums. What a cache makes of them is not part.
    stream_seconds, drive_seconds
        Of each round: all rows through the store, and as many bytes in plain reads.
    """

    tokens: int
    layers: int
    shadow_bytes: int
    row_bytes: int
    open_seconds: list[float]
    stream_seconds: list[float]
    drive_seconds: list[float]

    @property
    def share(self) -> float:
        """Of the seconds of streaming."""
        return median(self.open_seconds) / median(self.stream_seconds)

    @property
    def allowed_share(self) -> float:
        """What is aimed at: the shadow's bytes at the drive's rate, and 50 ms."""
        seconds = self.shadow_bytes / self.row_bytes * median(self.drive_seconds)
        return (seconds + _ALLOWED_SECONDS) / median(self.stream_seconds)


def measure_opening(
    place: Path, tokens: int, layers: int, rounds: int, say: Callable[[str], None]
) -> OpenRow:
    """Store a prompt with shadows, open and stream it in turn.

    Parameters
    ----------
    place
        Where the store is made.
    tokens, layers
        A multiple of 1,024, and how many layers.
    rounds
        How often.
    say
        Takes a line of progress.
    """
    _, row_bytes = SHAPES[_SHAPE]
    shadow_bytes = CHUNK_TOKENS * row_bytes // _SHADOW_PART
    space = Namespace.of({"bench": "opening"}, layers, row_bytes, shadow_bytes)
    shape, chunks, ids = ExtentShape.of(space), tokens // CHUNK_TOKENS, prompt(1, tokens)
    Store.create(place, (chunks + 2) * shape.byte_count + (64 << 20))
    with Store(place) as store:
        _put(store, space, ids)
    say(f"{tokens} tokens of {layers} layers stored with their shadows")
    opened: list[float] = []
    streamed: list[float] = []
    plain: list[float] = []
    for _ in range(rounds):
        with Store(place) as store:
            began = time.perf_counter()
            found = store.find(space, ids)
            assert found is not None, store.counts.last_failure
            with found:
                assert found.tokens == tokens
                _read_shadows(found)
                opened.append(time.perf_counter() - began)
                for times, read in ((plain, _plainly(store)), (streamed, read_all)):
                    began = time.perf_counter()
                    read(found)
                    times.append(time.perf_counter() - began)
    return OpenRow(
        tokens,
        layers,
        chunks * layers * shadow_bytes,
        tokens * layers * row_bytes,
        opened,
        streamed,
        plain,
    )


def _plainly(store: Store) -> Callable[[StoredPrefix], None]:
    return lambda found: read_plainly(store, found)


def _read_shadows(found: StoredPrefix) -> None:
    """Read all shadows as opening in place does, compared with their checksums."""
    for _ in found.shadows(range(len(found.chunks))):
        pass


def _put(store: Store, space: Namespace, ids: list[int]) -> None:
    rows = aligned_buffer(CHUNK_TOKENS * space.row_bytes).reshape(CHUNK_TOKENS, -1)
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
    shadow = aligned_buffer(space.shadow_bytes)
    shadow[:] = rows.reshape(-1)[: space.shadow_bytes]
    writer = store.writer(space, ids)
    assert writer is not None
    for position in range(len(ids) // CHUNK_TOKENS):
        for layer in range(space.layers):
            writer.write(layer, position * CHUNK_TOKENS // GROUP_TOKENS, rows)
            writer.write_shadow(layer, position, shadow)
        writer.publish((position + 1) * CHUNK_TOKENS)
    writer.close()
