# SPDX-License-Identifier: Apache-2.0
"""Estimates the area of the RTL kernels with open tools (`make synth`)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from hillinfer_hw.area_table import CORES, AreaCase, area_cases, stale, stored_line
from hillinfer_hw.build_cache import BUILD, ROOT
from hillinfer_hw.cpu_time import cpu_seconds
from hillinfer_hw.shard import add_shard
from hillinfer_hw.synth import CAVEATS, Area, SynthRow, above_goals, compare, expected_dsp
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.presets import PRESETS

BASELINES = ROOT / "hw" / "rtl" / "baselines.json"


def main() -> int:
    """Build what the arguments name, print and write the counts; 1 where they are not as stored."""
    arguments = _arguments()
    modes, rules = map(KeyMode, arguments.mode), map(Rule, arguments.rule)
    table = area_cases(arguments.preset, [*modes], [*rules], arguments.kernel, arguments.part)
    cases = arguments.shard.part(list(table))
    stored = json.loads(BASELINES.read_text()) if BASELINES.exists() else {}
    if arguments.stale:
        cases = [case for case in cases if stale(case, stored)]
    rows: list[SynthRow] = []
    wrong: list[str] = []
    seconds = 0.0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for case, (row, spent) in zip(cases, pool.map(timed_row_of, cases), strict=True):
            rows.append(row)
            seconds += spent
            print(_line(row), flush=True)
            expected = expected_dsp(case.spec, case.kernel)
            if row.area.dsp != expected:
                wrong.append(f"{row.name}: {row.area.dsp} DSP, the spec says {expected}")
            if arguments.update_baselines:
                stored[row.name] = stored_line(case, row.area)
                BASELINES.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
            wrong += compare([row], stored) + above_goals([row])
            if row.name in stored and (told := stale(case, stored)):
                wrong.append(told)
            # Written as it grows: a long run that is cut off leaves what it found.
            _write(arguments.out, rows, wrong, seconds / 60)
    print(CAVEATS)
    print(
        f"synth: {len(rows)} rows, {len(wrong)} differences, {seconds / 60:.1f} CPU minutes "
        f"(sources that were mapped before cost none): {arguments.out}"
    )
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


def timed_row_of(case: AreaCase) -> tuple[SynthRow, float]:
    """Return a kernel's row and the CPU seconds it took, those of yosys with them."""
    before = cpu_seconds()
    row = case.row(case.map())
    return row, cpu_seconds() - before


def _write(path: Path, rows: list[SynthRow], wrong: list[str], minutes: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "caveats": CAVEATS,
        "cpu_minutes": round(minutes, 1),
        "rows": [row.report() for row in rows],
        "differences": wrong,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--mode", nargs="+", choices=list(KeyMode), default=list(KeyMode))
    parser.add_argument("--rule", nargs="+", choices=list(Rule), default=list(Rule))
    parser.add_argument("--kernel", nargs="+", choices=list(CORES), default=list(CORES))
    parser.add_argument("--part", choices=["kernel", "core"], default="kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    add_shard(parser)
    parser.add_argument("--update-baselines", action="store_true")
    parser.add_argument(
        "--stale", action="store_true", help="only kernels whose stored counts are of other sources"
    )
    parser.add_argument("--out", type=Path, default=BUILD / "reports" / "synth.json")
    return parser.parse_args()


def _line(row: SynthRow) -> str:
    area: Area = row.area
    return (
        f"{row.name:50} LUT {area.lut:6d} ({area.lut_share:6.2%})  DSP {area.dsp:4d} "
        f"({area.dsp_share:6.2%})  FF {area.ff:6d}  BRAM36 {area.bram36:5.1f}  URAM {area.uram}"
    )


if __name__ == "__main__":
    sys.exit(main())
