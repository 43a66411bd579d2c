# SPDX-License-Identifier: Apache-2.0
"""The table of rivals."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hillinfer.errors import SettingsError
from hillinfer_bench.rivals.full_drive import FullDrive
from hillinfer_bench.rivals.full_memory import FullMemory
from hillinfer_bench.rivals.full_swap import FullSwap
from hillinfer_bench.rivals.h2o_all_keys import H2OAllKeys
from hillinfer_bench.rivals.h2o_drop import H2ODrop
from hillinfer_bench.rivals.infinigen import InfiniGen
from hillinfer_bench.rivals.leoam import LeoAM
from hillinfer_bench.rivals.quest import Quest
from hillinfer_bench.rivals.rival import Rival
from hillinfer_bench.rivals.setup import RivalSetup

RIVALS: Mapping[str, type[Rival]] = MappingProxyType(
    {
        "full-memory": FullMemory,
        "full-drive": FullDrive,
        "full-swap": FullSwap,
        "h2o-all-keys": H2OAllKeys,
        "infinigen": InfiniGen,
        "leoam": LeoAM,
        "quest": Quest,
        "h2o-drop": H2ODrop,
    }
)


def make_rival(name: str, setup: RivalSetup) -> Rival:
    """Return a rival by its name.

    Raises
    ------
    SettingsError
        Where there is none of that name.
    BudgetError, ColdPoolError
        As `Rival` says.
    """
    if name not in RIVALS:
        raise SettingsError(f"rival={name!r}: choose one of {', '.join(RIVALS)}")
    return RIVALS[name](setup)
