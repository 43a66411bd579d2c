# SPDX-License-Identifier: Apache-2.0
"""Estimates the area of the RTL kernels with open tools (`make synth`)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

from hillinfer_hw.build_cache import BUILD, ROOT
from hillinfer_hw.rtl_files import RTL, render_rtl
from hillinfer_hw.synth import (
    CAVEATS,
    Area,
    SynthRow,
    above_goals,
    compare,
    core_parameters,
    expected_dsp,
    synthesise,
)
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.presets import PRESETS, preset_spec

BASELINES = ROOT / "hw" / "rtl" / "baselines.json"
CORES = {"score_tokens": "score_core", "make_shadow": "shadow_core"}


@dataclass(frozen=True)
class Case:
    """One kernel of the table, whole or its core alone."""

    preset: str
    mode: KeyMode
    rule: Rule
    kernel: str
    core_only: bool

    @property
    def spec(self) -> KernelSpec:
        """What it is rendered from."""
        return preset_spec(self.preset, self.mode, self.rule)


def row_of(case: Case) -> SynthRow:
    """Map one kernel and count its cells."""
    spec = case.spec
    rule = "-" if case.kernel == "make_shadow" else case.rule
    if case.core_only:
        part = CORES[case.kernel]
        area = synthesise(part, sorted(RTL.glob("*.sv")), core_parameters(spec, case.kernel))
    else:
        part = case.kernel
        area = synthesise(part, render_rtl(spec, case.kernel).files, {})
    return SynthRow(case.preset, case.mode, rule, part, area)


def main() -> int:
    """Build what the arguments name, print and write the counts; 1 where they are not as stored."""
    arguments = _arguments()
    cases = list(_cases(arguments))
    rows, wrong = [], []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for case, row in zip(cases, pool.map(row_of, cases), strict=True):
            rows.append(row)
            print(_line(row), flush=True)
            expected = expected_dsp(case.spec, case.kernel)
            if row.area.dsp != expected:
                wrong.append(f"{row.name}: {row.area.dsp} DSP, the spec says {expected}")
    print(CAVEATS)
    stored = json.loads(BASELINES.read_text()) if BASELINES.exists() else {}
    if arguments.update_baselines:
        stored |= {row.name: asdict(row.area) for row in rows}
        BASELINES.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
    wrong += compare(rows, stored) + above_goals(rows)
    report = BUILD / "reports" / "synth.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    content = {"caveats": CAVEATS, "rows": [row.report() for row in rows], "differences": wrong}
    report.write_text(json.dumps(content, indent=2) + "\n")
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--mode", nargs="+", choices=list(KeyMode), default=list(KeyMode))
    parser.add_argument("--rule", nargs="+", choices=list(Rule), default=list(Rule))
    parser.add_argument("--kernel", nargs="+", choices=list(CORES), default=list(CORES))
    parser.add_argument("--part", choices=["kernel", "core"], default="kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--update-baselines", action="store_true")
    return parser.parse_args()


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    core_only = arguments.part == "core"
    for preset in arguments.preset:
        for mode in map(KeyMode, arguments.mode):
            if "score_tokens" in arguments.kernel:
                for rule in map(Rule, arguments.rule):
                    yield Case(preset, mode, rule, "score_tokens", core_only)
            # What a shadow is made of does not depend on the rule.
            if "make_shadow" in arguments.kernel and mode is not KeyMode.FP16:
                yield Case(preset, mode, Rule.RAW_SUM, "make_shadow", core_only)


def _line(row: SynthRow) -> str:
    area: Area = row.area
    return (
        f"{row.name:48} LUT {area.lut:6d} ({area.lut_share:6.2%})  DSP {area.dsp:4d} "
        f"({area.dsp_share:6.2%})  FF {area.ff:6d}  BRAM36 {area.bram36:5.1f}  URAM {area.uram}"
    )


if __name__ == "__main__":
    sys.exit(main())
