# SPDX-License-Identifier: Apache-2.0
"""Counts LUTs between registers in every module of the RTL (second half of `make synth`).

Modules are mapped one by one, with their own parameters, and some with others. What was found lies
in `hw/rtl/levels.json` with a fingerprint of the sources; `--update` writes it anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from hillinfer_hw.build_cache import BUILD
from hillinfer_hw.logic_levels import (
    MOST_LUTS,
    VARIANTS,
    Levels,
    fingerprint,
    levels_of,
    modules,
    sources_of,
)
from hillinfer_hw.rtl_files import RTL

STORED = RTL / "levels.json"


def found_of(module: str) -> tuple[Levels, str]:
    """Return the longest path of a module and its sources' fingerprint."""
    sources = sources_of(module, modules())
    return levels_of(module, sources), fingerprint(sources)


def main() -> int:
    """Map every module that is asked for; 1 where one is not as stored or too deep."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*modules(), *VARIANTS]
    parser.add_argument("--module", nargs="+", choices=names, default=names)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--update", action="store_true", help="store what is found")
    parser.add_argument("--out", type=Path, default=BUILD / "reports" / "levels.json")
    chosen = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    rows, wrong = {}, []
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for name, (levels, mark) in zip(
            chosen.module, pool.map(found_of, chosen.module), strict=True
        ):
            rows[name] = {"luts": levels.luts, "carries": levels.carries, "sources": mark}
            print(f"{name:40} {levels.luts:3d} LUTs, {levels.carries:3d} carry cells", flush=True)
            if levels.luts > MOST_LUTS:
                wrong.append(f"{name}: {levels.luts} LUTs, the goal is {MOST_LUTS}")
            if chosen.update:
                # As it grows: a run that is cut off leaves what it found.
                stored[name] = rows[name]
                STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
            elif rows[name] != stored.get(name):
                wrong.append(f"{name}: {rows[name]}, stored {stored.get(name)}")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps({"label": "yosys, LUTs", "rows": rows}, indent=1) + "\n")
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"levels: {len(rows)} modules, {len(wrong)} findings: {chosen.out}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
