# SPDX-License-Identifier: Apache-2.0
"""The subcommand of `hillinfer-bench` about the server, and its options."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer_bench.serving.request import TIMED, BesideSizes, LoadSizes, Part, ServingRequest

_SIZES, _BESIDE = LoadSizes(), BesideSizes()


def serving(
    model: Annotated[
        str, typer.Option(help="Registry name, folder, GGUF file, or organisation/name on the hub.")
    ] = DEFAULT_MODEL,
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory on the drive, where stores are made.")
    ] = Path("build"),
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of each timed figure.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=4, help="Of each stream's answer.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Of each stream's prompt.")] = 1000,
    document_tokens: Annotated[
        int, typer.Option(min=16, help="Of the document that is asked about after a restart.")
    ] = 6000,
    parts: Annotated[
        list[Part] | None,
        typer.Option(
            "--part",
            help="What is measured; give it again for more. By default what is timed; disconnects, "
            "planted, fuzzed and soak load the server, up to half an hour each.",
        ),
    ] = None,
    disconnects: Annotated[
        int, typer.Option(min=1, help="Clients that leave.")
    ] = _SIZES.disconnects,
    planted: Annotated[
        int, typer.Option(min=1, help="Requests with secrets in them.")
    ] = _SIZES.planted,
    fuzzed: Annotated[int, typer.Option(min=6, help="Requests of the fuzzer.")] = _SIZES.fuzzed,
    soak_seconds: Annotated[float, typer.Option(help="How long the soak lasts.")] = (
        _SIZES.soak_seconds
    ),
    soak_documents: Annotated[
        int, typer.Option(min=1, help="Its documents.")
    ] = _SIZES.soak_documents,
    kill_seconds: Annotated[float, typer.Option(help="From one of its kills to the next.")] = (
        _SIZES.kill_seconds
    ),
    sitting: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="After so many seconds planted and fuzzed ask no more; the next run with the same "
            "--out goes on where this one ended.",
        ),
    ] = None,
    peers: Annotated[
        Path, typer.Option(help="Where `make serve-peers` has put other servers.")
    ] = _BESIDE.peers,
    servers: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            help="Who is asked beside ours: transformers_serve, llama_cpp, vllm; give it again for "
            "more. By default all.",
        ),
    ] = None,
    questions: Annotated[
        int, typer.Option(min=1, help="About the same document, of rivals.")
    ] = _BESIDE.questions,
    documents: Annotated[int, typer.Option(min=2, help="Of open_context.")] = _BESIDE.documents,
    open_tokens: Annotated[
        int, typer.Option(min=64, help="Of each of these documents.")
    ] = _BESIDE.document_tokens,
    budget_documents: Annotated[
        float, typer.Option(help="How many of these documents' rows its budget is as large as.")
    ] = _BESIDE.budget_documents,
    rival_documents: Annotated[
        int,
        typer.Option(
            min=0, help="About how many of them rivals are asked at most; 0: computed alone."
        ),
    ] = _BESIDE.rival_documents,
    python: Annotated[
        str,
        typer.Option(
            help="The interpreter that our servers and `transformers serve` run in, with options "
            "of its own: a wrapper of this environment's, say. By default the one that runs this."
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Where the figures go as JSON.")] = Path(
        "build/reports/serve.json"
    ),
) -> None:
    """Measure the server: streams at once, its own cost, health, restarts, other servers."""
    quiet_transformers()
    from hillinfer_bench.serving.run import run

    chosen = frozenset(parts or TIMED)
    load = LoadSizes(
        disconnects, planted, fuzzed, soak_seconds, soak_documents, kill_seconds, sitting
    )
    beside = BesideSizes(
        peers,
        None if servers is None else frozenset(servers),
        questions,
        documents,
        open_tokens,
        budget_documents,
        rival_documents,
    )
    request = ServingRequest(
        *(model, directory, out, rounds, new_tokens, prompt_tokens, document_tokens, chosen, load),
        beside,
        tuple(shlex.split(python)) or (sys.executable,),
    )
    print(run(request, error_console().print))
