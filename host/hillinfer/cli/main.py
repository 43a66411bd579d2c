# SPDX-License-Identifier: Apache-2.0
"""The `hillinfer` command: its subcommands, each of which ends as `cli/ending.py` says."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence

import typer

from hillinfer.cli.bench import bench
from hillinfer.cli.console import shown_warnings
from hillinfer.cli.doctor import doctor
from hillinfer.cli.ending import carried, run_to_end
from hillinfer.cli.fetch import fetch
from hillinfer.cli.generate import generate
from hillinfer.cli.models import models
from hillinfer.cli.pool_picture import pool_picture
from hillinfer.cli.pools import pools
from hillinfer.cli.quality import quality
from hillinfer.cli.specs import specs
from hillinfer.cli.trace_picture import trace_picture

_COMMANDS: tuple[Callable[..., None], ...] = (
    generate,
    doctor,
    fetch,
    models,
    quality,
    pools,
    pool_picture,
    trace_picture,
    specs,
    bench,
)

app = typer.Typer(
    help="Long-context LLM inference with the KV cache on a drive.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _carrying(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose exceptions reach `main` as they are."""

    @functools.wraps(command)
    def carrying(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except BaseException as error:
            raise carried(error) from error

    return carrying


for _command in _COMMANDS:
    app.command()(_carrying(_command))


@app.callback(invoke_without_command=True)
def _program(context: typer.Context) -> None:
    """Long-context LLM inference with the KV cache on a drive."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process.

    What ends a command early becomes one line on standard error and the exit status that
    `ExitStatus` has for it. A defect shows its traceback where HILLINFER_TRACEBACK is set.

    Parameters
    ----------
    arguments
        Without the program's name; the process's own where None.
    """
    # Threads that spin while they wait for each other make a busy machine several times slower,
    # and an idle one hardly faster. OpenMP reads this when torch is loaded, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    given = None if arguments is None else list(arguments)

    def command() -> object:
        with shown_warnings():
            return app(given, prog_name="hillinfer", standalone_mode=False)

    sys.exit(run_to_end(command))
