# SPDX-License-Identifier: Apache-2.0
"""How each system is drawn, the same in every picture."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer_bench.systems.table import ABLATION, FLOOR, system_names

# No fewer than systems stand side by side in one picture: these differ by colour alone.
_COLORS = (
    "#0072b2", "#56b4e9", "#777777", "#222222", "#009e73", "#d55e00",
    "#8c6d1f", "#cc79a7", "#e69f00", "#882255", "#6a51a3", "#b8b800", "#44aa99", "#ee3377",
)  # fmt: skip
_HATCHES = ("", "//", "\\\\", "xx", "..", "++", "--", "oo")
_MARKERS = "os^Dv*PX"


@dataclass(frozen=True)
class SystemStyle:
    """What tells a system's bars and lines from those of others.

    Parameters
    ----------
    color
        Of bars and lines.
    hatch
        Of bars.
    marker
        Of lines.
    """

    color: str
    hatch: str
    marker: str

    @classmethod
    def of(cls, system: str) -> SystemStyle:
        """Return the style of a system of the table; no other one has its colour and hatch.

        Raises
        ------
        ValueError
            Where there is none of that name.
        """
        apart = (*ABLATION, FLOOR)
        order = [*(name for name in system_names() if name not in apart), *apart]
        number = order.index(system)
        # Systems of one colour move on by one more, as the lists may have a common divisor.
        shape = number + number // len(_COLORS)
        return cls(
            _COLORS[number % len(_COLORS)],
            _HATCHES[shape % len(_HATCHES)],
            _MARKERS[shape % len(_MARKERS)],
        )
