# SPDX-License-Identifier: Apache-2.0
"""Other ways to a first token behind a stored prefix: files per chunk, and today's session."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hillinfer
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling

CHUNK_FILES, SESSION = "files of 256 tokens, as LMCache lays them out", "HillInfer's session"
VLLM, LLAMA_CPP = "vllm, recomputed", "llama.cpp, slot restored"
# Tokens of a file, as LMCache 0.5 divides prompts by default.
FILE_TOKENS = 256
_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class RivalRow:
    """Time to the first token of one prompt in some other way.

    Parameters
    ----------
    name
        Who.
    seconds
        Of each round, from the prompt to the first token.
    read_seconds
        Of each round: the part before anything was computed; empty where nobody knows.
    agrees
        Whether the first token is the one that transformers computes; None where nobody compared.
    skipped
        Why there is none, and how to have one; empty where there is.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    read_seconds: list[float] = field(default_factory=list)
    agrees: bool | None = None
    skipped: str = ""

    @property
    def median(self) -> float | None:
        """Seconds to the first token, median; None where there are none."""
        return median(self.seconds) if self.seconds else None


# --- Files per chunk ---


def measure_chunk_files(
    place: Path,
    model: Any,
    held: Any,
    ids: Sequence[int],
    expected: int,
    rounds: int,
) -> RivalRow:
    """Store a cache in files of 256 tokens of all layers, read all, and compute the rest then.

    So does LMCache with a local disk: a file holds keys and values of all layers, uint16 here as
    the store's rows have. The files are not in the page cache.

    Parameters
    ----------
    place
        An existing directory.
    model
        Of transformers.
    held
        A `DynamicCache` of the first tokens.
    ids
        Of the whole prompt.
    expected
        The token that follows.
    rounds
        How often.
    """
    from transformers import DynamicCache

    files = list(_written(place, held))
    total, read = [], []
    agrees = True
    for _ in range(rounds):
        forget(files)
        began = time.perf_counter()
        cache = DynamicCache(config=model.config)
        parts = [torch.from_numpy(_read(file)) for file in files]
        heads, size = held.layers[0].keys.shape[1], held.layers[0].keys.shape[3]
        layers = len(held.layers)
        whole = torch.cat(
            [part.view(torch.float16).view(2, layers, -1, heads, size) for part in parts], 2
        )
        for layer in range(layers):
            keys, values = (
                one[layer].to(model.dtype).transpose(0, 1)[None].contiguous() for one in whole
            )
            cache.update(keys, values, layer)
        read.append(time.perf_counter() - began)
        # What the store's own rows are attended to with: only where rows come from differs.
        with hillinfer.grouped_query(model):
            agrees = agrees and first_token(model, cache, ids) == expected
        total.append(time.perf_counter() - began)
    return RivalRow(CHUNK_FILES, total, read, agrees)


def _written(place: Path, held: Any) -> Iterator[Path]:
    tokens = held.get_seq_length()
    for start in range(0, tokens, FILE_TOKENS):
        both = torch.stack(
            [
                torch.stack(
                    [
                        states[0, :, start : start + FILE_TOKENS].transpose(0, 1).to(torch.float16)
                        for states in side
                    ]
                )
                for side in (
                    [one.keys for one in held.layers],
                    [one.values for one in held.layers],
                )
            ]
        )
        file = place / f"{start:08}.kv"
        with file.open("wb") as opened:
            opened.write(both.numpy().tobytes())
            os.fsync(opened.fileno())
        yield file


def _read(file: Path) -> Any:
    import numpy as np

    found = np.empty(file.stat().st_size, np.uint8)
    with file.open("rb", buffering=0) as opened:
        opened.readinto(found.data)
    return found


def forget(files: Sequence[Path]) -> None:
    """Let the page cache forget files."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def first_token(model: Any, cache: Any, ids: Sequence[int]) -> int:
    """Return the most probable token behind a prompt whose first tokens a cache holds."""
    generation = Generation(model, cache, _CHUNK_TOKENS)
    generation.read(ids[cache.get_seq_length() :])
    (token,) = generation.decode(Sampling(), 1, frozenset())
    return token


# --- Today's session ---


def measure_session(
    place: Path,
    attachment: Any,
    fill: Callable[[Any], object],
    ids: Sequence[int],
    rounds: int,
) -> RivalRow:
    """Save a session of the first tokens, load it, and compute the rest.

    Loading compares every file with its checksum first; rows are read where they lie then.

    Parameters
    ----------
    place
        Does not exist yet.
    attachment
        HillInfer on the model.
    fill
        Fills a cache with the first tokens.
    ids
        Of the whole prompt.
    rounds
        How often.
    """
    with _closing(attachment.new_cache()) as cache:
        fill(cache)
        cache.save_session(place)
    total, read = [], []
    for _ in range(rounds):
        forget([file for file in place.iterdir() if file.is_file()])
        began = time.perf_counter()
        with _closing(attachment.load_session(place)) as cache:
            read.append(time.perf_counter() - began)
            first_token(attachment.model, cache, ids)
            total.append(time.perf_counter() - began)
    return RivalRow(SESSION, total, read)


@contextmanager
def _closing(cache: Any) -> Iterator[Any]:
    try:
        yield cache
    finally:
        cache.close()
