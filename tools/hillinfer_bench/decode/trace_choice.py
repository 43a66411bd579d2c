# SPDX-License-Identifier: Apache-2.0
"""Which system of a plan a trace is of."""

from __future__ import annotations

from collections.abc import Sequence

from hillinfer.errors import SettingsError
from hillinfer_bench.decode.case import Case
from hillinfer_bench.systems.table import make_system


def check_one_traced(cases: Sequence[Case]) -> None:
    """Refuse a trace unless exactly one system of exactly one case writes it.

    Raises
    ------
    SettingsError
        Where there are several, or none; the message names them.
    """
    found = [name for case in cases for name in case.systems if make_system(name).traced]
    if len(found) == 1:
        return
    named = ", ".join(dict.fromkeys(found)) or "none"
    raise SettingsError(
        "--trace writes one file, of one HillInfer system in one case; the plan has of these "
        f"systems {named}, in {len(cases)} cases: choose with --systems, --models, --contexts, "
        "--alphas, --budgets, --batches"
    )
