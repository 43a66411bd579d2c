# SPDX-License-Identifier: Apache-2.0
"""The subcommand `slim`, and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers
from hillinfer.models.registry_model import DEFAULT_MODEL


def slim(
    model: Annotated[
        str, typer.Option(help="Registry name, folder, GGUF file, or organisation/name on the hub.")
    ] = DEFAULT_MODEL,
    contexts: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of timed prompts; 4096 and 7800 if none, 0 for no timed rows."),
    ] = None,
    documents: Annotated[
        int, typer.Option(min=0, help="Documents with needles, of each length; 0 for none.")
    ] = 20,
    lengths: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of documents; 2000 and 7000 if none, 0 for no documents."),
    ] = None,
    ways: Annotated[
        list[str] | None,
        typer.Option(
            help="How documents are read besides whole: a schedule, or one with a ranker such as "
            "'15:50% paper', with entering, completed or drive behind it; all ways of the results "
            "page if none."
        ),
    ] = None,
    texts: Annotated[
        int, typer.Option(help="Texts that are read on token by token; 0 for none.")
    ] = 3,
    decoding: Annotated[
        list[str] | None,
        typer.Option(
            help="A schedule, or one with a ranker, of documents whose answers are decoded from "
            "blocks that were kept, from blocks that move, and from a tenth of their rows; without "
            "--ways, questions are asked in no other way. Timed contexts and texts stay: "
            "--contexts 0 and --texts 0 leave them out."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Repetitions of each timed figure.")] = 3,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="Timed with random weights: llama-3.2-1b, qwen2.5-7b, llama-3.1-8b, at 16k and "
            "32k, or as llama-3.1-8b:32768; none if none."
        ),
    ] = None,
    caches: Annotated[
        list[str] | None,
        typer.Option(
            help="Into which timed prompts are read: ordinary, drive; both if none. What is over "
            "the ordinary cache is told of both alone."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go as JSON.")] = Path(
        "build/reports/slim.json"
    ),
) -> None:
    """Measure reading in stages: first token beside FLOPs, answers about needles, KL on text."""
    quiet_transformers()
    from hillinfer_bench.slim.decoding import decoding_way
    from hillinfer_bench.slim.quality import FULL, Way
    from hillinfer_bench.slim.run import WAYS, ShapeTokens, SlimRequest, run
    from hillinfer_bench.slim.speed import parse_caches
    from hillinfer_bench.slim.text import TextPlan

    asked: tuple[Way, ...] = () if decoding else WAYS
    if ways is not None:
        asked = (Way(FULL), *(Way.parse(one) for one in ways if one != FULL))
    request = SlimRequest(
        model,
        out,
        tuple(one for one in contexts or (4096, 7800) if one),
        documents,
        tuple(one for one in lengths or (2000, 7000) if one and documents),
        rounds,
        tuple(one for text in shapes or () for one in ShapeTokens.parse(text)),
        asked,
        TextPlan(texts),
        tuple(map(decoding_way, decoding or ())),
        parse_caches(caches),
    )
    print(run(request, error_console().print))
