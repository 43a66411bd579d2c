# SPDX-License-Identifier: Apache-2.0
"""Options of a run of `hillinfer-bench serving`, and the parts that can be taken alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Part(StrEnum):
    """What is measured, in the order in which it is."""

    STREAMS = "streams"
    """Tokens per second of one, four and eight streams."""
    LIMIT = "limit"
    """What the model's own loop allows streams to gain together."""
    COST = "cost"
    """What the server adds to a first token."""
    HEALTH = "health"
    """How soon `/health` answers under eight streams."""
    RESTART = "restart"
    """First token for a stored document after a restart, beside reading a new one."""
    RIVALS = "rivals"
    """The same of `transformers serve`, llama.cpp's server and vLLM's, and of ours beside them."""
    OPEN_CONTEXT = "open_context"
    """Many documents in a budget of two."""
    DISCONNECTS = "disconnects"
    """Clients that leave at random moments."""
    PLANTED = "planted"
    """Requests of many tenants with secrets."""
    FUZZED = "fuzzed"
    """Requests that a schema fuzzer makes."""
    SOAK = "soak"
    """Streams and documents for long, with kills and a full drive."""


TIMED = frozenset({Part.STREAMS, Part.LIMIT, Part.COST, Part.HEALTH, Part.RESTART, Part.RIVALS})
"""What a run takes where nobody names parts: the others take up to half an hour each."""


@dataclass(frozen=True)
class LoadSizes:
    """How much load there is.

    Parameters
    ----------
    disconnects, planted, fuzzed
        Requests of these parts.
    soak_seconds, soak_documents, kill_seconds
        How long the last one lasts, with how many documents, and from one kill to the next.
    sitting_seconds
        After so long a run asks no more of `planted` and `fuzzed`, and the next one with the same
        report goes on there; None: one run asks all.
    """

    disconnects: int = 1000
    planted: int = 10_000
    fuzzed: int = 10_000
    soak_seconds: float = 1200.0
    soak_documents: int = 50
    kill_seconds: float = 150.0
    sitting_seconds: float | None = None


@dataclass(frozen=True)
class BesideSizes:
    """What other servers are asked, and how much context is open.

    Parameters
    ----------
    peers
        Where `make serve-peers` puts servers that are not of this environment.
    servers
        Keys of the servers that are asked beside ours; None: all.
    questions
        About the same document, on the server that has read it.
    documents, document_tokens
        Of the part with many documents.
    budget_documents
        How many documents' rows its budget is as large as.
    rival_documents
        About how many of them rivals are asked at most; 0: what they hold is computed alone.
    """

    peers: Path = Path("build/peers")
    servers: frozenset[str] | None = None
    questions: int = 8
    documents: int = 30
    document_tokens: int = 8000
    budget_documents: float = 2.0
    rival_documents: int = 0


@dataclass(frozen=True)
class ServingRequest:
    """Options of one run.

    Parameters
    ----------
    model
        Registry name, folder, GGUF file, or organisation/name on the hub.
    directory
        On the drive; stores and cold pools are made there and removed.
    out
        Where the JSON goes.
    rounds
        Of each timed figure.
    new_tokens
        Of each answer of a stream.
    prompt_tokens, document_tokens
        Of the text of a stream's prompt, and of the document.
    parts
        What of it is measured.
    load
        Sizes of the parts that only load the server.
    beside
        What other servers are asked.
    python
        The interpreter that our servers and `transformers serve` run in, with options of its own.
    """

    model: str
    directory: Path
    out: Path
    rounds: int = 3
    new_tokens: int = 64
    prompt_tokens: int = 1000
    document_tokens: int = 6000
    parts: frozenset[Part] = TIMED
    load: LoadSizes = LoadSizes()
    beside: BesideSizes = BesideSizes()
    python: tuple[str, ...] = (sys.executable,)
