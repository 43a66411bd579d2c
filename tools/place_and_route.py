# SPDX-License-Identifier: Apache-2.0
"""Places and routes modules of the RTL for an ECP5 (part of `make synth`).

An independent trend, no frequency of a KU15P. What was found lies in `hw/rtl/frequencies.json`
with a fingerprint of the sources; `--update` writes it anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from hillinfer_hw.build_cache import BUILD
from hillinfer_hw.logic_levels import fingerprint, modules, sources_of
from hillinfer_hw.place_and_route import DEVICE_NAME, SEED, Placed, place_and_route
from hillinfer_hw.rtl_files import RTL

STORED = RTL / "frequencies.json"
LABEL = f"nextpnr, {DEVICE_NAME}: an independent trend, no frequency of a KU15P"
# Larger than the device, or half an hour each: whole datapaths, whose parts are placed.
LEFT_OUT = ("score_core", "score_cores", "shadow_core")


def found_of(module: str, seed: int) -> tuple[Placed, str]:
    """Return what became of a module, and its sources' fingerprint."""
    sources = sources_of(module, modules())
    return place_and_route(module, sources, seed), fingerprint(sources)


def main() -> int:
    """Place every module that is asked for; 1 where one is not as stored."""
    usual = [name for name in modules() if name not in LEFT_OUT]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", nargs="+", choices=list(modules()), default=usual)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--update", action="store_true", help="store what is found")
    parser.add_argument("--out", type=Path, default=BUILD / "reports" / "frequencies.json")
    chosen = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    rows, wrong = {}, []
    names = chosen.module
    with ProcessPoolExecutor(chosen.jobs) as pool:
        found = pool.map(found_of, names, [chosen.seed] * len(names))
        for name, (placed, mark) in zip(names, found, strict=True):
            rows[name] = asdict(placed) | {"sources": mark}
            print(
                f"{name:20} {placed.megahertz:6.1f} MHz, {placed.luts:6d} LUTs of four,"
                f" {placed.registers:6d} registers",
                flush=True,
            )
            if chosen.update:
                # As it grows: a run that is cut off leaves what it found.
                stored[name] = rows[name]
                STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
            elif chosen.seed == SEED and rows[name] != stored.get(name):
                wrong.append(f"{name}: {rows[name]}, stored {stored.get(name)}")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps({"label": LABEL, "rows": rows}, indent=1) + "\n")
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{LABEL}\nplace and route: {len(rows)} modules, {len(wrong)} findings: {chosen.out}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
