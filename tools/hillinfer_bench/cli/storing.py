# SPDX-License-Identifier: Apache-2.0
"""Subcommands of `hillinfer-bench` about stores, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers, reading_view
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer_bench.storing.part import Part

# As in other subcommands.
Model = Annotated[
    str, typer.Option(help="Registry name, folder, GGUF file, or organisation/name on the hub.")
]


def storing(
    model: Model = DEFAULT_MODEL,
    directory: Annotated[
        Path, typer.Option("--store-dir", help="Directory on the drive, where stores are made.")
    ] = Path("build"),
    kills: Annotated[int, typer.Option(help="Processes that are killed.")] = 500,
    flips: Annotated[int, typer.Option(help="Bits that are flipped.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Repetitions of each timed figure.")] = 7,
    tokens: Annotated[int, typer.Option(help="Stored tokens, a multiple of 1,024.")] = 8192,
    gigabytes: Annotated[
        float, typer.Option(help="Most rows of a shape; it has fewer layers then.")
    ] = 1.2,
    mixed_seconds: Annotated[
        float, typer.Option(help="How long four processes read, store and evict at once.")
    ] = 60.0,
    peers: Annotated[
        Path | None, typer.Option(help="Figures of other runtimes, from tools/stored_peers.py.")
    ] = None,
    parts: Annotated[
        list[Part] | None,
        typer.Option("--part", help="What is measured; give it again for more. All by default."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go as JSON.")] = Path(
        "build/reports/store.json"
    ),
) -> None:
    """Measure the store: rates, first token, lookups, kills, failing calls, flips, mixed load."""
    quiet_transformers()
    from hillinfer_bench.storing.run import StoreRequest, run

    chosen = frozenset(parts or Part)
    request = StoreRequest(
        model, directory, out, kills, flips, rounds, tokens, gigabytes, mixed_seconds, peers, chosen
    )
    console = error_console()
    print(run(request, console.print, reading_view(console, "steps").stage))


def sealed_pool(
    model: Model = DEFAULT_MODEL,
    directory: Annotated[
        Path, typer.Option("--cold-dir", help="Directory on the drive, where cold pools lie.")
    ] = Path("build"),
    tokens: Annotated[int, typer.Option(help="Of the prompt.")] = 4096,
    answer_tokens: Annotated[int, typer.Option(help="Of its answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Pairs.")] = 7,
    out: Annotated[Path, typer.Option(help="Where the figures go as JSON.")] = Path(
        "build/reports/sealed_pool.json"
    ),
) -> None:
    """Measure what a sealed cold pool costs a prompt and its answer, beside a plain one."""
    quiet_transformers()
    from hillinfer_bench.storing.sealed_pool import SealedPoolRequest, run

    request = SealedPoolRequest(model, directory, out, tokens, answer_tokens, rounds)
    print(run(request, error_console().print))


def first_steps(
    model: Model = DEFAULT_MODEL,
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory on the drive, where all rows lie.")
    ] = Path("build"),
    tokens: Annotated[int, typer.Option(help="Of the prompt, a multiple of 1,024.")] = 7168,
    steps: Annotated[int, typer.Option(help="Behind it, a multiple of 10.")] = 70,
    budgets: Annotated[
        list[str] | None, typer.Option(help="DRAM budget; give it again for more.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go as JSON.")] = Path(
        "build/reports/first_steps.json"
    ),
) -> None:
    """Count what the first steps read behind a prompt: just read, stored, from a session."""
    quiet_transformers()
    from hillinfer_bench.storing.first_steps import FirstStepsRequest, run

    chosen = tuple(budgets or ("25%", "40%"))
    request = FirstStepsRequest(model, directory, out, tokens, steps, chosen)
    print(run(request, error_console().print))
