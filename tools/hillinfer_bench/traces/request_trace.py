# SPDX-License-Identifier: Apache-2.0
"""Traces of requests as Mooncake published them: when, how many tokens, which blocks."""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hillinfer.errors import HillInferError

BLOCK_TOKENS = 512
"""Tokens of a block; the last one of a request may hold fewer."""
# A document of this many blocks costs as much in attention as in linear layers: 30,000 tokens.
_EVEN_BLOCKS = 58.6
_MOST_LINE = 1 << 20

CARRIED = Path(__file__).parent / "data"
"""The traces that come with the benchmark, and their license."""
SYNTHETIC = "synthetic"
CARRIED_TRACES = ("conversation", SYNTHETIC)


class TraceError(HillInferError):
    """A file is no trace of requests, or its blocks form no chains."""


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    Parameters
    ----------
    time
        When it arrived, seconds.
    tokens
        Tokens of its prompt.
    blocks
        The prompt's blocks, first to last, by number. A block's number stands for its tokens and
        all before it.
    """

    time: float
    tokens: int
    blocks: tuple[int, ...]

    def tokens_of(self, blocks: int) -> int:
        """Return the tokens of the first `blocks` blocks."""
        return min(self.tokens, blocks * BLOCK_TOKENS)


@dataclass(frozen=True)
class RequestTrace:
    """Requests in order of time whose blocks are numbered from 0 and form chains.

    Parameters
    ----------
    name
        What tables call it.
    requests
        In order of time.
    distinct
        Blocks that are there: their numbers are below.
    """

    name: str
    requests: tuple[Request, ...]
    distinct: int

    @classmethod
    @cache
    def carried(cls, name: str) -> RequestTrace:
        """Return one of `CARRIED_TRACES`; reading it takes a second, once."""
        return cls.read(CARRIED / f"{name}_trace.jsonl.xz", name)

    @classmethod
    def read(cls, file: Path, name: str | None = None) -> RequestTrace:
        """Read a trace in Mooncake's format, plain or compressed by xz.

        Raises
        ------
        TraceError
            Where the file cannot be read, a line is no request, times go back, or a block follows
            one block here and another there.
        """
        try:
            requests = tuple(_requests(_lines(file)))
            distinct = _check_chains(requests)
        except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
            raise TraceError(f"{file} is no trace of requests: {error}; name another") from error
        return cls(name or file.name.partition(".")[0], requests, distinct)

    @property
    def tokens(self) -> int:
        """Return the tokens of all prompts."""
        return sum(request.tokens for request in self.requests)


def block_cost(position: int) -> float:
    """Return the relative time to compute a block: 1 for linear layers, and attention before it."""
    return 1 + position / _EVEN_BLOCKS


def _lines(file: Path) -> Iterator[bytes]:
    if file.suffix == ".xz":
        with lzma.open(file) as packed:
            yield from iter(lambda: packed.readline(_MOST_LINE), b"")
    else:
        with file.open("rb") as plain:
            yield from iter(lambda: plain.readline(_MOST_LINE), b"")


def _requests(lines: Iterable[bytes]) -> Iterator[Request]:
    """Yield the requests of lines, blocks numbered by their first sight."""
    numbers: dict[int, int] = {}
    before = 0.0
    for count, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            time, tokens, ids = told["timestamp"], told["input_length"], told["hash_ids"]
            if not isinstance(ids, list):
                raise TypeError
            request = Request(
                float(time) / 1000,
                int(tokens),
                tuple(numbers.setdefault(int(one), len(numbers)) for one in ids),
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(f"line {count} is no request ({type(error).__name__})") from error
        if not before <= request.time < float("inf"):
            raise ValueError(f"line {count} is earlier than the one before")
        if len(request.blocks) != -(-request.tokens // BLOCK_TOKENS) or not request.blocks:
            raise ValueError(f"line {count} has {tokens} tokens and {len(request.blocks)} blocks")
        before = request.time
        yield request


def _check_chains(requests: Iterable[Request]) -> int:
    """Return how many blocks there are; each must follow the same one everywhere."""
    parents: dict[int, int] = {}
    for request in requests:
        parent = -1
        for block in request.blocks:
            if parents.setdefault(block, parent) != parent:
                raise ValueError(f"block {block} follows {parents[block]} and {parent}")
            parent = block
    return len(parents)
