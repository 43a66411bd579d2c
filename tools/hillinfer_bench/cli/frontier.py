# SPDX-License-Identifier: Apache-2.0
"""The subcommands `frontier` and `frontier-picture`, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers, reading_view
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.system.files import check_apart, prepare_report
from hillinfer.system.machine import NumberType
from hillinfer_bench.figures.canvas import require_matplotlib, save_figure
from hillinfer_bench.quality.texts import TextsRequest


def frontier(
    model: Annotated[
        str, typer.Option(help="Registry name, folder, GGUF file, or organisation/name on the hub.")
    ] = DEFAULT_MODEL,
    texts: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 text; give it again for more. By default the Python reference."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each text.")] = 4096,
    last: Annotated[int, typer.Option(help="Tokens of it that are read with each setting.")] = 128,
    systems: Annotated[
        list[str] | None,
        typer.Option(help="Only this rival beside HillInfer; give it again for more."),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Timed steps of each system; 0 for the sweep alone.")
    ] = 12,
    real_context: Annotated[
        int, typer.Option(help="Tokens of the real model's timed text; 0 for no such rows.")
    ] = 7936,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="Timed with random weights; opt-6.7b and llama-13b if none, 0 for none at all."
        ),
    ] = None,
    shape_context: Annotated[int, typer.Option(help="Tokens of these.")] = 32_768,
    shape_layers: Annotated[
        int,
        typer.Option(
            help="Layers of these that are built, half as many in memory; the first two are never "
            "predicted."
        ),
    ] = 12,
    real_budget: Annotated[
        float, typer.Option(help="DRAM budget of the real model, as a share of its KV.")
    ] = 0.25,
    shape_budget: Annotated[float, typer.Option(help="That of shapes.")] = 0.2,
    at_kl: Annotated[
        list[float] | None,
        typer.Option(
            help="The real model is also timed where all have this KL; again for more. "
            ".010 and .003 if none, 0 for HillInfer's own alone."
        ),
    ] = None,
    shape_at_kl: Annotated[
        list[float] | None,
        typer.Option(help="So are shapes, each as long again; HillInfer's own KL alone if none."),
    ] = None,
    dtype: Annotated[
        NumberType, typer.Option(help="auto: the model's own, float32 where a CPU is slow at it.")
    ] = NumberType.AUTO,
    shape_dtype: Annotated[
        NumberType,
        typer.Option(help="Of shapes. auto: bfloat16, float32 where a CPU is slow at it."),
    ] = NumberType.AUTO,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads; by default one per core.")
    ] = None,
    cold_dir: Annotated[
        Path | None, typer.Option(help="Directory on the drive, for everybody's rows.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Where the figures go as JSON; the sweep's rows, which a restart goes on with, "
            "and a picture lie beside it."
        ),
    ] = Path("build/reports/frontier.json"),
) -> None:
    """Sweep every system's own knob and compare bytes and times at equal KL."""
    quiet_transformers()
    from hillinfer_bench.frontier.equal import TOLD_KLS
    from hillinfer_bench.frontier.request import FrontierRequest, TimedPlan
    from hillinfer_bench.frontier.run import run
    from hillinfer_bench.systems.shapes import PAPER_SHAPES

    chosen = tuple(one for one in shapes or PAPER_SHAPES if one != "0")
    request = FrontierRequest(
        TextsRequest(model, dtype, tuple(texts or ()), context, last, (), threads, out),
        tuple(systems or ()),
        TimedPlan(
            real_context,
            chosen,
            shape_context,
            real_budget,
            shape_budget,
            steps,
            shape_dtype,
            shape_layers,
            tuple(one for one in at_kl or TOLD_KLS if one),
            tuple(one for one in shape_at_kl or () if one),
        ),
        cold_dir,
    )
    console = error_console()
    print(run(request, console.print, reading_view(console).stage))


def frontier_picture(
    file: Annotated[Path, typer.Argument(help="Report of `hillinfer-bench frontier`.")],
    *,
    out: Annotated[Path, typer.Option(help="Where the picture goes: SVG by its name, else PNG.")],
) -> None:
    """Draw KL against bytes and against milliseconds, for every system."""
    require_matplotlib()
    check_apart((("FILE", file), ("--out", out)))
    prepare_report(out, "--out", "the picture")
    # It loads torch, before which a command says how OpenMP's threads wait.
    from hillinfer_bench.figures.frontier_figure import frontier_figure, read_frontier

    save_figure(frontier_figure(read_frontier(file)), out)
    print(out)
