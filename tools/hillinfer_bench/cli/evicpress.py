# SPDX-License-Identifier: Apache-2.0
"""The subcommand `evicpress`, and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.system.files import check_apart, prepare_report
from hillinfer_bench.figures.canvas import require_matplotlib, save_figure
from hillinfer_bench.figures.evicpress_figure import evicpress_figure, read_rivals


def evicpress(
    model: Annotated[
        str, typer.Option(help="Registry name, folder, GGUF file, or organisation/name on the hub.")
    ] = DEFAULT_MODEL,
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory on the drive, where the store is made.")
    ] = Path("build"),
    documents: Annotated[int, typer.Option(help="How many documents are asked for.")] = 12,
    requests: Annotated[int, typer.Option(help="How many requests, in the trace's order.")] = 60,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest document.")] = 512,
    longest: Annotated[int, typer.Option(help="Tokens of the longest document.")] = 2048,
    budget: Annotated[
        float, typer.Option(help="Share of all rows' bytes that forms may take in memory.")
    ] = 0.125,
    alpha: Annotated[
        list[float] | None,
        typer.Option(help="Seconds that quality 1 is worth; give it again for more. 0.3 and 1."),
    ] = None,
    sized_alpha: Annotated[
        list[float] | None,
        typer.Option(help="The same with --sized files; 0.05 to 0.4, six of them."),
    ] = None,
    probes: Annotated[int, typer.Option(help="Parts of a document that forms are chosen by.")] = 4,
    questions: Annotated[int, typer.Option(help="Other parts, that are asked for.")] = 3,
    kills: Annotated[
        int, typer.Option(help="Processes that are killed while forms move; 0 for none.")
    ] = 200,
    sized: Annotated[
        int,
        typer.Option(
            help="Tokens in files of Llama 8B's size, for each of a document; 0 for no such files."
        ),
    ] = 2,
    topic_questions: Annotated[
        int, typer.Option(help="Questions about another topic of one document; 0 for none.")
    ] = 20,
    instances: Annotated[
        int, typer.Option(help="Random placements beside the optimum; 0 for none.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Of the identities that are drawn.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the figures go as JSON.")] = Path(
        "build/reports/evicpress.json"
    ),
    picture: Annotated[
        Path | None, typer.Option(help="SVG or PNG file of quality and rate by first token.")
    ] = None,
) -> None:
    """Play requests for many documents in little memory to EvicPress' policy, rivals and ours."""
    if picture is not None:
        require_matplotlib()
        check_apart((("--out", out), ("--picture", picture)))
        prepare_report(picture, "--picture", "the picture")
    quiet_transformers()
    from hillinfer_bench.evicpress.run import ALPHAS, SIZED_ALPHAS, EvicPressRequest, run
    from hillinfer_bench.evicpress.workload import WorkloadSize

    size = WorkloadSize(documents, requests, shortest, longest, seed)
    request = EvicPressRequest(
        model,
        directory,
        out,
        size,
        budget,
        tuple(alpha or ALPHAS),
        probes,
        questions,
        kills,
        sized,
        tuple(sized_alpha or SIZED_ALPHAS),
        topic_questions,
        instances,
    )
    print(run(request, error_console().print))
    if picture is not None:
        save_figure(evicpress_figure(read_rivals(out)), picture)
