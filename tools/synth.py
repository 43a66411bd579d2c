# SPDX-License-Identifier: Apache-2.0
"""Estimates the area of the RTL kernels with open tools (`make synth`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from hillinfer_hw.build_cache import BUILD, ROOT
from hillinfer_hw.rtl_files import RTL, render_rtl
from hillinfer_hw.synth import (
    CAVEATS,
    Area,
    SynthRow,
    compare,
    core_parameters,
    expected_dsp,
    synthesise,
)
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.presets import PRESETS, preset_spec

BASELINES = ROOT / "hw" / "rtl" / "baselines.json"
CORES = {"score_tokens": "score_core", "make_shadow": "shadow_core"}


def main() -> int:
    """Build what the arguments name, print and write the counts; 1 where they are not as stored."""
    arguments = _arguments()
    rows, wrong = [], []
    for preset, mode, rule, kernel in _cases(arguments):
        spec = preset_spec(preset, mode, rule)
        if arguments.part == "core":
            part = CORES[kernel]
            area = synthesise(part, sorted(RTL.glob("*.sv")), core_parameters(spec, kernel))
        else:
            part = kernel
            area = synthesise(kernel, render_rtl(spec, kernel).files, {})
        row = SynthRow(preset, mode, "-" if kernel == "make_shadow" else rule, part, area)
        rows.append(row)
        print(_line(row), flush=True)
        if area.dsp != expected_dsp(spec, kernel):
            wrong.append(f"{row.name}: {area.dsp} DSP, the spec says {expected_dsp(spec, kernel)}")
    print(CAVEATS)
    stored = json.loads(BASELINES.read_text()) if BASELINES.exists() else {}
    if arguments.update_baselines:
        stored |= {row.name: asdict(row.area) for row in rows}
        BASELINES.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
    wrong += compare(rows, stored)
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
    parser.add_argument("--update-baselines", action="store_true")
    return parser.parse_args()


def _cases(arguments: argparse.Namespace) -> Iterator[tuple[str, KeyMode, Rule, str]]:
    for preset in arguments.preset:
        for mode in map(KeyMode, arguments.mode):
            if "score_tokens" in arguments.kernel:
                for rule in map(Rule, arguments.rule):
                    yield preset, mode, rule, "score_tokens"
            # What a shadow is made of does not depend on the rule.
            if "make_shadow" in arguments.kernel and mode is not KeyMode.FP16:
                yield preset, mode, Rule.RAW_SUM, "make_shadow"


def _line(row: SynthRow) -> str:
    area: Area = row.area
    return (
        f"{row.name:48} LUT {area.lut:6d} ({area.lut_share:6.2%})  DSP {area.dsp:4d} "
        f"({area.dsp_share:6.2%})  FF {area.ff:6d}  BRAM36 {area.bram36:5.1f}  URAM {area.uram}"
    )


if __name__ == "__main__":
    sys.exit(main())
