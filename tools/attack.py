# SPDX-License-Identifier: Apache-2.0
"""`make attack`: runs commands under kills, flipped bits, hostile folders and planted code."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SEED = 17
_SUMS = ("tried", "refused", "harmless", "wrong")


def main() -> None:
    """Run the parts, two at a time, write the report, and fail where anything is wrong."""
    from attacks.parts import PARTS

    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("build/reports/attack.json"))
    arguments.add_argument("--seed", type=int, default=SEED)
    arguments.add_argument(
        "--part", action="append", choices=PARTS, help="one part only; may be repeated"
    )
    arguments.add_argument("--jobs", type=int, default=2, help="parts at a time")
    arguments.add_argument(
        "--keep", type=Path, default=Path("build/attack"), help="where bad inputs are kept"
    )
    arguments.add_argument("--alone", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.alone:
        _alone(given.alone, given.seed, given.keep, given.out)
        return
    started = time.monotonic()
    parts = _all(given.part or list(PARTS), given)
    report: dict[str, Any] = {
        "seed": given.seed,
        "seconds": round(time.monotonic() - started, 1),
        **{name: sum(part[name] for part in parts.values()) for name in _SUMS},
        "parts": parts,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for name, part in parts.items():
        for one in part["found"]:
            print(f"{name}: {one['what']}\n  again: {one['again']}")
        for line in part["skipped"]:
            print(f"{name}: skipped: {line}")
    for name, part in parts.items():
        print(f"{name}: " + ", ".join(f"{part[key]} {key}" for key in _SUMS))
    print(json.dumps({key: report[key] for key in ("seed", "seconds", *_SUMS)}, indent=2))
    sys.exit(1 if report["wrong"] else 0)


def _all(names: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """Run each part in a process of its own, because parts fork."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        waiting, running = list(names), {}
        while waiting or running:
            while waiting and len(running) < given.jobs:
                name = waiting.pop(0)
                command = [sys.executable, __file__, "--alone", name, "--seed", str(given.seed)]
                command += ["--keep", str(given.keep), "--out", str(Path(folder) / name)]
                running[name] = subprocess.Popen(command)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode:
                    sys.exit(f"the part {name} of the attack broke: see above")
                text = (Path(folder) / name).read_text(encoding="utf-8")
                found[name] = json.loads(text)
                print(f"{name}: {found[name]['seconds']} s", file=sys.stderr, flush=True)
            time.sleep(0.05)
    return {name: found[name] for name in names}


def _alone(name: str, seed: int, keep: Path, out: Path) -> None:
    from attacks.commands import Commands
    from attacks.part import Ground, Part
    from attacks.parts import PARTS
    from fuzzing.preloaded import preload

    preload()
    part = Part(name)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"attack-{name}-") as folder, Commands() as commands:
        ground = Ground(Path(folder), keep, commands)
        PARTS[name](ground, part, random.Random(f"{seed} {name}"))
    found = part.as_json() | {"seconds": round(time.monotonic() - started, 1)}
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
