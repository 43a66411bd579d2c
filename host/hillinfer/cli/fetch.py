# SPDX-License-Identifier: Apache-2.0
"""`hillinfer fetch`: put a registry model on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from hillinfer.cli.console import error_console, quiet_transformers
from hillinfer.models.registry_model import DEFAULT_MODEL, registry_model


def fetch(
    name: Annotated[str, typer.Argument(help="Name of a registry model.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a registry model, convert it once and print its folder."""
    model = registry_model(name)
    if not model.present:
        quiet_transformers()
    print(model.fetch(error_console().print))
