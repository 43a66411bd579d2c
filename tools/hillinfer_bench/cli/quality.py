# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench quality`: what selecting tokens costs in quality, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers, reading_view
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.request import QualityRequest

_ALPHAS = (0.05, 0.1, 0.2)


def quality(
    model: Annotated[
        str,
        typer.Option(help="Registry name, folder, GGUF file, or organisation/name on the hub."),
    ] = DEFAULT_MODEL,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="UTF-8 text whose beginning is read; give it again for more. By default three "
            "parts of the Python reference."
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each text.")] = 4096,
    last: Annotated[int, typer.Option(help="Tokens of it that are read sparsely.")] = 128,
    alpha: Annotated[
        list[float] | None,
        typer.Option(help="Importance rate; give it again for more. By default 0.05, 0.1, 0.2."),
    ] = None,
    dtype: Annotated[
        NumberType, typer.Option(help="auto: the model's own, float32 where a CPU is slow at it.")
    ] = NumberType.AUTO,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads; by default one per core.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the figures go as JSON.")] = None,
) -> None:
    """Compare rules, shadows and other ways to select with the full cache, on real text."""
    request = QualityRequest(
        model=model,
        number_type=dtype,
        texts=tuple(texts or ()),
        context=context,
        last=last,
        alphas=tuple(alpha or _ALPHAS),
        threads=threads,
        out=out,
    )
    quiet_transformers()
    # torch and transformers take seconds to import: help and bad options do not wait for them.
    from hillinfer_bench.quality.run import run

    console = error_console()
    print(run(request, console.print, reading_view(console).stage))
