# SPDX-License-Identifier: Apache-2.0
"""Says which of the commands `hillinfer` and `hillinfer-bench` has a subcommand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hillinfer.cli.parsing import Program

BENCH = frozenset(
    {
        *("decode", "quality", "precision", "frontier", "pools", "traces", "storing", "slim"),
        *("study", "compare", "pool-picture", "trace-picture", "store-picture", "prune-picture"),
        *("frontier-picture", "documents-picture", "evicpress", "serving", "hosts"),
    }
)


def module_of(arguments: Sequence[object]) -> str:
    """Return the module whose `main` has the subcommand that is named first."""
    bench = bool(arguments) and str(arguments[0]) in BENCH
    return "hillinfer_bench.cli.main" if bench else "hillinfer_command"


def main_of(arguments: Sequence[object]) -> Program:
    """Return the entry point that has the subcommand that is named first."""
    if module_of(arguments) == "hillinfer_command":
        from hillinfer.cli.main import main
    else:
        from hillinfer_bench.cli.main import main
    return main
