# SPDX-License-Identifier: Apache-2.0
"""The kernels whose area is estimated, what each is mapped from, and counts that are stored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hillinfer_hw.logic_levels import fingerprint, modules, sources_of
from hillinfer_hw.rtl_files import RTL, render_rtl
from hillinfer_hw.synth import GOALS_PRESET, Area, SynthRow, core_parameters, synthesise
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import MOST_QUERIES, KernelSpec
from hillinfer_model.presets import preset_spec

# The kernel that is also mapped with as many queries a pass as there may be: whole.
SEVERAL = (GOALS_PRESET, KeyMode.INT4, Rule.WEIGHT_SUM, False)
CORES = {"score_tokens": "score_core", "make_shadow": "shadow_core"}


@dataclass(frozen=True)
class AreaCase:
    """One kernel of the table, whole or its core alone."""

    preset: str
    mode: KeyMode
    rule: Rule
    kernel: str
    core_only: bool
    queries: int = 1

    @property
    def spec(self) -> KernelSpec:
        """What it is rendered from."""
        return preset_spec(self.preset, self.mode, self.rule, self.queries)

    @property
    def part(self) -> str:
        """Name of the module that is mapped."""
        return CORES[self.kernel] if self.core_only else self.kernel

    @property
    def parameters(self) -> dict[str, int]:
        """What the module's parameters are set to; a whole kernel is rendered with its own."""
        return core_parameters(self.spec, self.kernel) if self.core_only else {}

    def row(self, area: Area) -> SynthRow:
        """Return the line of the report with these counts."""
        rule = "-" if self.kernel == "make_shadow" else self.rule
        return SynthRow(self.preset, self.mode, rule, self.part, area, self.queries)

    @property
    def name(self) -> str:
        """Name of its counts among those that are stored."""
        return self.row(Area(0, 0, 0, 0, 0)).name

    def files(self) -> tuple[Path, ...]:
        """Return what is given to the tool: every module, and a whole kernel's top."""
        if self.core_only:
            return tuple(sorted(RTL.glob("*.sv")))
        return render_rtl(self.spec, self.kernel).files

    def modules(self) -> dict[str, Path]:
        """Return the file of every module, a whole kernel's top among them."""
        top = next(path for path in self.files() if path.stem == self.part)
        return modules() | {self.part: top}

    def mark(self) -> str:
        """Return the fingerprint of what it is made of."""
        return mark_of(self.part, self.modules(), self.parameters)

    def map(self) -> Area:
        """Map it and count its cells."""
        return synthesise(self.part, self.files(), self.parameters)


def mark_of(part: str, files: Mapping[str, Path], parameters: Mapping[str, int]) -> str:
    """Return the fingerprint of a module, of all it is built of, and of its parameters.

    Parameters
    ----------
    part
        Its name.
    files
        The file of every module; what it is not built of is not read.
    parameters
        Those it is mapped with.
    """
    values = json.dumps(parameters, sort_keys=True)
    return fingerprint([*sources_of(part, files), ("", values)])


def area_cases(
    presets: Sequence[str],
    modes: Sequence[KeyMode] = tuple(KeyMode),
    rules: Sequence[Rule] = tuple(Rule),
    kernels: Sequence[str] = tuple(CORES),
    part: str = "kernel",
) -> Iterator[AreaCase]:
    """Yield the kernels of the table, whole (`kernel`) or their cores (`core`)."""
    core_only = part == "core"
    for preset in presets:
        for mode in modes:
            if "score_tokens" in kernels:
                for rule in rules:
                    yield AreaCase(preset, mode, rule, "score_tokens", core_only)
                    if (preset, mode, rule, core_only) == SEVERAL:
                        yield AreaCase(*SEVERAL[:3], "score_tokens", core_only, MOST_QUERIES)
            # What a shadow is made of does not depend on the rule.
            if "make_shadow" in kernels and mode is not KeyMode.FP16:
                yield AreaCase(preset, mode, Rule.RAW_SUM, "make_shadow", core_only)


def stored_line(case: AreaCase, area: Area) -> dict[str, Any]:
    """Return counts as they are stored, with the mark of what they were made of."""
    return asdict(area) | {"sources": case.mark()}


def stored_area(line: Mapping[str, Any]) -> Area:
    """Return the counts of a line that is stored."""
    return Area(**{field.name: line[field.name] for field in fields(Area)})


def stale(case: AreaCase, stored: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return why stored counts are none of today's sources; None where they are."""
    line = stored.get(case.name)
    if line is None:
        return f"{case.name}: no baseline"
    if line.get("sources") != case.mark():
        return f"{case.name}: counted of other sources; set it anew with --update-baselines"
    return None
