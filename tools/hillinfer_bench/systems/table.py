# SPDX-License-Identifier: Apache-2.0
"""The table of systems."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hillinfer.errors import SettingsError
from hillinfer_bench.rivals.table import RIVALS
from hillinfer_bench.systems.hillinfer_system import HillInferSystem
from hillinfer_bench.systems.rival_system import RivalSystem
from hillinfer_bench.systems.stock import StockSystem, dynamic_cache, static_cache
from hillinfer_bench.systems.system import System

HILLINFER, IN_MEMORY, FLOOR = "hillinfer", "hillinfer-in-memory", "floor"
IN_MEMORY_TRUE = "hillinfer-in-memory-true"
STOCK = ("transformers-dynamic", "transformers-static")
# Any full cache computes the same logits up to rounding; the first that was measured is compared
# with.
REFERENCES = ("transformers-dynamic", "full-memory", "full-drive")
# From nothing to everything (the paper's figure 16a): scores in one block and no pool but the
# most recent rows; scores in blocks, merged as they come; pools; queries predicted.
_NONE = {"block_tokens": 65_536, "pool_policy": "recent", "query": "true"}
ABLATION = ("hillinfer-none", "hillinfer-hie", "hillinfer-bkp", "hillinfer-app")

_OWN: Mapping[str, System] = MappingProxyType(
    {
        system.name: system
        for system in (
            HillInferSystem(HILLINFER),
            HillInferSystem(IN_MEMORY, memory_kv=1.5),
            # With nothing to read ahead, predicting costs time and changes the selection.
            HillInferSystem(IN_MEMORY_TRUE, {"query": "true"}, memory_kv=1.5),
            HillInferSystem("hillinfer-none", _NONE),
            HillInferSystem("hillinfer-hie", {"pool_policy": "recent", "query": "true"}),
            HillInferSystem("hillinfer-bkp", {"query": "true"}),
            HillInferSystem("hillinfer-app", {"query": "predicted"}),
            StockSystem(FLOOR, dynamic_cache, most_tokens=1),
            *(
                StockSystem(name, make)
                for name, make in zip(STOCK, (dynamic_cache, static_cache), strict=True)
            ),
        )
    }
)


def system_names() -> tuple[str, ...]:
    """Return the names of all systems."""
    return (*_OWN, *RIVALS)


def selects(name: str) -> bool:
    """Return whether a system attends to a part of the context."""
    return name not in (FLOOR, *STOCK) and not name.startswith("full-")


def make_system(name: str) -> System:
    """Return a system by its name.

    Raises
    ------
    SettingsError
        Where there is none of that name.
    """
    if name in RIVALS:
        return RivalSystem(name)
    if name not in _OWN:
        raise SettingsError(f"system={name!r}: choose one of {', '.join(system_names())}")
    return _OWN[name]
