# SPDX-License-Identifier: Apache-2.0
"""`hillinfer prune-profile`: which schedule a model keeps its answers with."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hillinfer.cli.console import error_console, quiet_transformers
from hillinfer.errors import SettingsError
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.system.files import prepare_report, write_whole
from hillinfer.system.machine import NumberType
from hillinfer.values import check_threads

_LEAST_TOKENS = 600


def prune_profile(
    model: Annotated[str, typer.Argument(help="Folder or name of a model.")] = DEFAULT_MODEL,
    *,
    documents: Annotated[int, typer.Option(help="Documents, with two numbers in each.")] = 10,
    tokens: Annotated[int, typer.Option(help="Of each document.")] = 2000,
    ranker: Annotated[str, typer.Option(help="Rule by which blocks are chosen.")] = "weights",
    dtype: Annotated[NumberType, typer.Option(help="Type to compute in.")] = NumberType.AUTO,
    threads: Annotated[int | None, typer.Option(help="Compute threads.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the evidence goes as JSON.")] = None,
) -> None:
    """Measure by which layer a model tells a prompt's blocks apart, and name a schedule."""
    if documents < 1:
        raise SettingsError(f"--documents {documents} must be at least 1")
    if tokens < _LEAST_TOKENS:
        raise SettingsError(
            f"--tokens {tokens} makes too few blocks to choose among: give {_LEAST_TOKENS} at least"
        )
    check_threads(threads)
    if out is not None:
        prepare_report(out, "--out")
    quiet_transformers()
    import torch

    from hillinfer.models.loader import load_model
    from hillinfer.pruning.needles import needle_document
    from hillinfer.pruning.profile import make_profile
    from hillinfer.pruning.rankers import make_ranker

    chosen = make_ranker(ranker)
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(model, dtype)
    made = [needle_document(loaded.tokenizer, tokens, seed) for seed in range(documents)]
    found = make_profile(loaded.model, made, chosen, error_console().print)
    console = Console(markup=False, highlight=False, emoji=False)
    curve = Table("layer that decides", "least share of blocks, in nine of ten questions")
    for layer, share in enumerate(found.least_shares):
        curve.add_row(str(layer), f"{share:.0%}")
    console.print(curve)
    tried = Table("schedule", "right", "NLL", "FLOPs allow")
    for one in found.tried:
        right = f"{one.right} of {one.questions}"
        tried.add_row(one.schedule or "none", right, f"{one.nll:.2f}", f"x{one.flop_limit:.2f}")
    console.print(tried)
    print(f"schedule: {found.schedule or 'none: no schedule kept the answers of a whole read'}")
    if out is not None:
        told = {
            "label": "measured",
            "model": loaded.name,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "ranker": ranker,
            "documents": documents,
            "tokens": tokens,
            **asdict(found),
        }
        write_whole(out, json.dumps(told, indent=1).encode())
