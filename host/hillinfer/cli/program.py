# SPDX-License-Identifier: Apache-2.0
"""A command with subcommands, each of which ends as `cli/ending.py` says."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence

import typer

from hillinfer.cli.console import shown_warnings
from hillinfer.cli.ending import carried, run_to_end


class Program:
    """A command of this project.

    Parameters
    ----------
    name
        As it is called.
    description
        First line of its help.
    commands
        Functions, each a subcommand by its own name.
    """

    def __init__(
        self, name: str, description: str, commands: Sequence[Callable[..., None]]
    ) -> None:
        self._name = name
        self._app = typer.Typer(
            help=description,
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
        )
        for command in commands:
            self._app.command()(_carrying(command))
        self._app.callback(invoke_without_command=True, help=description)(_show_help)

    def __call__(self, arguments: Sequence[str] | None = None) -> None:
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
                return self._app(given, prog_name=self._name, standalone_mode=False)

        sys.exit(run_to_end(command))


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _carrying(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose exceptions reach the end as they are."""

    @functools.wraps(command)
    def carrying(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except BaseException as error:
            raise carried(error) from error

    return carrying
