# SPDX-License-Identifier: Apache-2.0
"""The two parts that set our server beside others, from a run's options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from hillinfer.errors import SettingsError
from hillinfer.models.loader import ModelOutline
from hillinfer_bench.serving.beside.open_context import (
    OpenContextRow,
    held_by,
    measure_open_context,
)
from hillinfer_bench.serving.beside.rival_servers import HILLINFER, RIVALS, ServerKind, Setting
from hillinfer_bench.serving.beside.rivals import RivalsRow, measure_rivals
from hillinfer_bench.serving.measures import COUNTS
from hillinfer_bench.serving.request import ServingRequest
from hillinfer_bench.serving.servers import hillinfer_server
from hillinfer_bench.serving.streams import Texts

# What a chat's template and a question add to a text, and no more than that.
_CHAT_TOKENS = 64
_STORED_BYTES, _WIDEST_BYTES = 2, 4
_RIVAL_ROUNDS = 2
# What ours works with beside rows is more than a tiny model's rows are.
_LEAST_ROOM = 1 << 24

Say = Callable[[str], None]


def beside_others(
    request: ServingRequest,
    place: Path,
    outline: ModelOutline,
    prompts: list[str],
    document: str,
    say: Say,
) -> RivalsRow:
    """Ask our server and the others the same.

    Parameters
    ----------
    request
        Sizes, and who is asked.
    place
        Directory for stores and logs.
    outline
        Of the model.
    prompts, document
        Texts.
    say
        Takes a line of progress.
    """
    most = max(request.prompt_tokens, request.document_tokens) + request.new_tokens + _CHAT_TOKENS
    every = len(prompts) * (request.prompt_tokens + request.new_tokens + _CHAT_TOKENS) + most
    room = max(every * _values(outline) * _WIDEST_BYTES, _LEAST_ROOM)
    setting = _setting(request, place, outline, most, room)
    rounds = min(request.rounds, _RIVAL_ROUNDS)
    kinds = [HILLINFER, *_rivals(request)]
    return measure_rivals(
        *(kinds, setting, prompts, document, request.new_tokens, rounds),
        *(request.beside.questions, say),
    )


def with_open_context(
    request: ServingRequest, place: Path, outline: ModelOutline, say: Say
) -> OpenContextRow:
    """Have documents of many times the budget answered from, and say what others hold in it.

    Parameters
    ----------
    request, place, outline, say
        As of `beside_others`.
    """
    sizes = request.beside
    tokens = sizes.document_tokens
    stored = _values(outline) * _STORED_BYTES
    budget = max(int(sizes.budget_documents * tokens * stored), 1 << 20)
    texts = [
        f"Document {number}.\n\n{text}"
        for number, text in enumerate(_documents(outline, sizes.documents, tokens))
    ]
    options = ["--files", str(place / "files"), "--dram-budget", f"{budget >> 10}KiB"]
    options += ["--queue", str(4 * len(texts)), "--parallel", str(len(texts))]
    options += ["--store-size", f"{max(3 * stored * tokens * len(texts) >> 20, 64)}MiB"]
    start = partial(
        hillinfer_server, place, request.model, len(texts), options, python=request.python
    )
    row = measure_open_context(start, texts, request.new_tokens, stored, say)
    most = tokens + request.new_tokens + _CHAT_TOKENS
    setting = _setting(request, place, outline, most, budget)
    asked = texts[: sizes.rival_documents]
    row.rivals = [held_by(kind, setting, asked, tokens, say) for kind in _rivals(request)]
    return row


def _documents(outline: ModelOutline, count: int, tokens: int) -> Iterator[str]:
    """Return texts of so many tokens; where the reference ends it begins anew."""
    texts = Texts(outline.tokenizer)
    for _ in range(count):
        try:
            yield texts.take(tokens)
        except SettingsError:
            texts = Texts(outline.tokenizer)
            yield texts.take(tokens)


def _rivals(request: ServingRequest) -> list[ServerKind]:
    wanted = request.beside.servers
    return [kind for kind in RIVALS if wanted is None or kind.key in wanted]


def _setting(
    request: ServingRequest, place: Path, outline: ModelOutline, most: int, cache_bytes: int
) -> Setting:
    place.mkdir(parents=True, exist_ok=True)
    return Setting(
        model=request.model,
        folder=Path(outline.source.folder),
        number_type=str(outline.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        parallel=max(COUNTS),
        context=min(most, outline.shape.max_positions),
        cache_bytes=cache_bytes,
        token_values=_values(outline),
        peers=request.beside.peers,
        place=place,
        python=request.python,
    )


def _values(outline: ModelOutline) -> int:
    shape = outline.shape
    return 2 * shape.layers * shape.kv_heads * shape.head_dim
