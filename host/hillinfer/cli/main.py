# SPDX-License-Identifier: Apache-2.0
"""The `hillinfer` command: its subcommands, and how every error ends in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from hillinfer.cli.bench import bench
from hillinfer.cli.console import shown_warnings
from hillinfer.cli.doctor import doctor
from hillinfer.cli.fetch import fetch
from hillinfer.cli.generate import generate
from hillinfer.cli.models import models
from hillinfer.cli.pool_picture import pool_picture
from hillinfer.cli.pools import pools
from hillinfer.cli.quality import quality
from hillinfer.cli.specs import specs
from hillinfer.cli.trace_picture import trace_picture
from hillinfer.errors import BrokenRunError, HillInferError
from hillinfer.option_names import without_python_names

EXIT_BROKEN = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
_RUN_MODULES = frozenset({"torch", "transformers", "safetensors", "gguf", "accelerate"})

app = typer.Typer(
    help="Long-context LLM inference with the KV cache on a drive.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(generate)
app.command()(doctor)
app.command()(fetch)
app.command()(models)
app.command()(quality)
app.command()(pools)
app.command()(pool_picture)
app.command()(trace_picture)
app.command()(specs)
app.command()(bench)


@app.callback(invoke_without_command=True)
def _program(context: typer.Context) -> None:
    """Long-context LLM inference with the KV cache on a drive."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process.

    What a user can act on becomes one line on standard error and exit code 2, or 1 where a run
    broke in the middle and was reported; an interrupt ends with 130. Anything else is a defect and
    keeps its traceback.

    Parameters
    ----------
    arguments
        Without the program's name; the process's own where None.
    """
    # Threads that spin while they wait for each other make a busy machine several times slower,
    # and an idle one hardly faster. OpenMP reads this when torch is loaded, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        given = None if arguments is None else list(arguments)
        with shown_warnings():
            code = app(given, prog_name="hillinfer", standalone_mode=False)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BrokenRunError as error:
        code = _fail(str(error), EXIT_BROKEN)
    except HillInferError as error:
        code = _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in _RUN_MODULES:
            raise
        code = _fail(f"{error.name} is not installed: pip install 'hillinfer[run]'")
    except typer.TyperException as error:
        code = _fail(error.format_message())
    if code == EXIT_INTERRUPTED:
        print("hillinfer: interrupted", file=sys.stderr)
    sys.exit(code)


def _fail(message: str, code: int = EXIT_ERROR) -> int:
    line = without_python_names(" ".join(message.split()))
    print(f"hillinfer: error: {line}", file=sys.stderr)
    return code
