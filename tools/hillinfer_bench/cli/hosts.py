# SPDX-License-Identifier: Apache-2.0
"""The subcommand of `hillinfer-bench` about many hosts, and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer_bench.hosts.request import HostsRequest, Part


def hosts(
    model: Annotated[
        str, typer.Option(help="Registry name, folder, GGUF file, or organisation/name on the hub.")
    ] = DEFAULT_MODEL,
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory on the drive, where stores are made.")
    ] = Path("build"),
    parts: Annotated[
        list[Part] | None,
        typer.Option("--part", help="What is made; give it again for more. By default both."),
    ] = None,
    documents: Annotated[int, typer.Option(help="That each policy has read.")] = 8,
    document_tokens: Annotated[int, typer.Option(help="Of each.")] = 1500,
    questions: Annotated[int, typer.Option(help="About each, in a drawn order.")] = 5,
    together: Annotated[int, typer.Option(help="Requests under way at once.")] = 2,
    copies: Annotated[
        int, typer.Option(help="Of each trace for the model of a fleet, four hosts for each.")
    ] = 8,
    share: Annotated[
        float, typer.Option(help="What all stores of a fleet hold over the distinct blocks.")
    ] = 0.2,
    out: Annotated[Path, typer.Option(help="Where the figures go as JSON.")] = Path(
        "build/reports/hosts.json"
    ),
) -> None:
    """Measure a router before two replicas, and model a fleet over copies of public traces."""
    quiet_transformers()
    from hillinfer_bench.hosts.run import run

    chosen = frozenset(parts or Part)
    sizes = documents, document_tokens, questions, together, copies, share
    request = HostsRequest(chosen, model, directory, *sizes, out)
    print(run(request, error_console().print))
