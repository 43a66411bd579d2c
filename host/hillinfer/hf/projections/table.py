# SPDX-License-Identifier: Apache-2.0
"""The table of projections: which class for which `--projections`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hillinfer.errors import SettingsError
from hillinfer.hf.projections.fp16 import Fp16
from hillinfer.hf.projections.fused import Fused
from hillinfer.hf.projections.int8 import Int8
from hillinfer.hf.projections.prepacked import Prepacked
from hillinfer.hf.projections.projection_way import ProjectionWay

PROJECTIONS: Mapping[str, type[ProjectionWay]] = MappingProxyType(
    {
        "stock": ProjectionWay,
        "fused": Fused,
        "prepacked": Prepacked,
        "fp16": Fp16,
        "int8": Int8,
    }
)


def make_projections(name: str) -> ProjectionWay:
    """Return the way of a name, or raise SettingsError naming those there are."""
    if name not in PROJECTIONS:
        raise SettingsError(
            f"projections={name!r} is unknown: choose one of {', '.join(PROJECTIONS)}"
        )
    return PROJECTIONS[name]()
