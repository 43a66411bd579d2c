# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench decode`: decode latency beside the rivals', in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers, reading_view
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.system.machine import NumberType


def decode(
    plan: Annotated[
        str,
        typer.Option(
            help="quick, goals or full; estimated: a minute, ten minutes, hours of 2 cores."
        ),
    ] = "quick",
    model: Annotated[
        str,
        typer.Option(help="Real model: it is measured, and its selections are replayed by others."),
    ] = DEFAULT_MODEL,
    systems: Annotated[
        list[str] | None, typer.Option(help="Only this system; give it again for more.")
    ] = None,
    contexts: Annotated[
        list[int] | None, typer.Option(help="Only this context; give it again for more.")
    ] = None,
    alphas: Annotated[
        list[float] | None, typer.Option(help="Only this α; give it again for more.")
    ] = None,
    models: Annotated[
        list[str] | None, typer.Option(help="Only this model or shape; give it again for more.")
    ] = None,
    batches: Annotated[
        list[int] | None, typer.Option(help="Only this batch; give it again for more.")
    ] = None,
    budgets: Annotated[
        list[float] | None,
        typer.Option(help="Only this DRAM budget, such as 0.2 of the KV; give it again for more."),
    ] = None,
    shadows: Annotated[
        list[str] | None, typer.Option(help="Only this shadow; give it again for more.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Measured steps of every case, in place of the plan's.")
    ] = None,
    dtype: Annotated[
        NumberType, typer.Option(help="auto: the model's own, float32 where a CPU is slow at it.")
    ] = NumberType.AUTO,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads; by default one per core.")
    ] = None,
    cold_dir: Annotated[
        Path | None, typer.Option(help="Directory on the drive, for everybody's rows.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where the figures go as JSON; pictures lie beside it.")
    ] = Path("build/reports/bench.json"),
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace of the one HillInfer system of the one case left; see trace-picture."
        ),
    ] = None,
) -> None:
    """Let HillInfer, its rivals and transformers' caches decode in turns and compare them."""
    quiet_transformers()
    # torch and transformers take seconds to import: help and bad options do not wait for them.
    from hillinfer_bench.decode.plan import Chosen
    from hillinfer_bench.decode.request import BenchRequest
    from hillinfer_bench.decode.run import run

    chosen = Chosen(
        systems=tuple(systems or ()),
        contexts=tuple(contexts or ()),
        alphas=tuple(alphas or ()),
        models=tuple(models or ()),
        batches=tuple(batches or ()),
        budgets=tuple(budgets or ()),
        shadows=tuple(shadows or ()),
        steps=steps,
    )
    request = BenchRequest(plan, model, dtype, chosen, threads, cold_dir, out, trace)
    console = error_console()
    print(run(request, console.print, reading_view(console).stage))
