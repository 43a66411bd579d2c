# SPDX-License-Identifier: Apache-2.0
"""`make fuzz`: tries odd inputs on everything that is read; each must work or be refused."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

SEED = 17


def main() -> None:
    """Try inputs, write the report, and fail where there is something to mend."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("build/reports/fuzz.json"))
    arguments.add_argument("--seed", type=int, default=SEED)
    arguments.add_argument("--seconds", type=float, help="how long; else a fixed number of inputs")
    arguments.add_argument("--inputs", type=int, help="how many of each target")
    arguments.add_argument("--target", action="append", help="one target only; may be repeated")
    arguments.add_argument(
        "--keep", type=Path, default=Path("build/fuzz"), help="where inputs with findings go"
    )
    arguments.add_argument("--replay", type=Path, nargs="+", help="inputs that were kept")
    given = arguments.parse_args()
    from fuzzing.fuzzer import Fuzzer
    from fuzzing.preloaded import preload
    from fuzzing.targets import MINUTE, TARGETS

    preload()
    names = given.target or list(MINUTE)
    if unknown := set(names) - set(MINUTE):
        arguments.error(f"no target {', '.join(unknown)}: choose from {', '.join(MINUTE)}")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        keep = Path(scratch, "kept") if given.replay else given.keep
        fuzzer = Fuzzer(TARGETS, Path(scratch), keep, given.seed)
        if given.replay:
            for file, verdict in fuzzer.replay(given.replay):
                print(f"{file}: {verdict.kind}: {verdict.what} {verdict.where}")
        elif given.seconds:
            shares = {name: MINUTE[name] for name in names}
            fuzzer.run_seconds(shares, given.seconds, _say)
        else:
            fuzzer.run_counts({name: given.inputs or MINUTE[name] for name in names}, _say)
    report = fuzzer.tally.as_json()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for one in report["found"]:
        print(f"{one['target']}: {one['kind']} ×{one['count']}: {one['what']} {one['where']}")
        if not given.replay:
            print(f"  again: python tools/fuzz.py --replay {one['files'][0]}")
    shown = ("seed", "seconds", "inputs", "worked", "refused", "findings")
    print(json.dumps({name: report[name] for name in shown}, indent=2))
    sys.exit(1 if report["found"] else 0)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
