# SPDX-License-Identifier: Apache-2.0
"""`hillinfer lm-eval`: EleutherAI's evaluation harness with the model and the tasks of here."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import typer

from hillinfer.cli.console import quiet_transformers
from hillinfer.errors import HillInferError, SettingsError
from hillinfer.native.library import native_library

NAME = "hillinfer"
_MODEL = "hillinfer.harness.model:HillInferLM"
_TASKS = Path(__file__).parents[2] / "harness" / "tasks"
# Words of the harness' command; without one of them it runs.
_RUN, _WORDS = "run", ("run", "ls", "validate")


def lm_eval(context: typer.Context) -> None:
    """Evaluate with EleutherAI's harness: takes the options of its command lm-eval.

    The model is `hillinfer` where --model names no other. Tasks of this project are found too:
    hillinfer_needle, hillinfer_lines, hillinfer_choice, hillinfer_perplexity, or all: hillinfer.
    """
    check_extra()
    native_library()
    quiet_transformers()
    # The registry asks for the harness' own models only while it is empty.
    importlib.import_module("lm_eval.models")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    # Later versions of the harness read entry points, and know the model already.
    if NAME not in model_registry:
        model_registry.register(NAME, target=_MODEL)
    before = sys.argv
    sys.argv = ["hillinfer lm-eval", *completed(context.args)]
    try:
        cli_evaluate()
    except HillInferError:
        raise
    except (ValueError, KeyError) as error:
        # So the harness tells of arguments and tasks that are none.
        raise SettingsError(f"lm-eval: {error}") from error
    finally:
        sys.argv = before


def completed(given: list[str]) -> list[str]:
    """Return arguments for the harness, with the model and the tasks of this project."""
    if not given:
        return ["--help"]
    word, rest = (given[0], given[1:]) if given[0] in _WORDS else (_RUN, given)
    if any(one in ("-h", "--help") for one in rest):
        return [word, *rest]
    added: list[str] = []
    if word == _RUN and not _names(rest, "--model", "-M", "--config", "-C"):
        added += ["--model", NAME]
    if not _names(rest, "--include_path"):
        added += ["--include_path", str(_TASKS)]
    return [word, *rest, *added]


def check_extra() -> None:
    """Refuse, by SettingsError, to go on without what the extra `lm-eval` brings."""
    if find_spec("lm_eval") is None:
        raise SettingsError("lm_eval is not installed: pip install 'hillinfer[run,lm-eval]'")


def _names(arguments: list[str], *options: str) -> bool:
    return any(one == name or one.startswith(f"{name}=") for one in arguments for name in options)
