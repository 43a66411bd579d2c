# SPDX-License-Identifier: Apache-2.0
"""Where the interpreter of PYNQ's environment is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hillinfer.errors import SettingsError

VARIABLE = "HILLINFER_PYNQ_PYTHON"
# Where `make pynq-env` makes it; in an installed package nothing is there.
_MADE = Path(__file__).resolve().parents[3] / "build" / "pynq-env" / "bin" / "python"


def pynq_python(named: Path | None, environment: Mapping[str, str], made: Path = _MADE) -> Path:
    """Return the interpreter that the PYNQ front runs in.

    Parameters
    ----------
    named
        What the user chose; None for the environment variable, or else for `made`.
    environment
        Variables of this process.
    made
        The one of the source tree.

    Raises
    ------
    SettingsError
        Where it is no program.
    """
    found = named or Path(environment.get(VARIABLE) or made)
    if not (found.is_file() and os.access(found, os.X_OK)):
        raise SettingsError(
            f"device=pynq needs the interpreter of PYNQ's environment, and {found} is none: "
            "`make pynq-env` in HillInfer's source tree makes it (build/pynq-env/bin/python), "
            f"--pynq-python FILE or {VARIABLE} names one"
        )
    # Links are kept, because an environment's interpreter is one; the front works elsewhere.
    return found.absolute()
