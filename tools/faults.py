# SPDX-License-Identifier: Apache-2.0
"""`make faults`: fails I/O calls, kills processes, and writes one report about both."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

HARNESS = Path(__file__).parents[1] / "tests" / "host"
PARTS = ("io", "kills")
SEED = 4
KILLS = 200
# In the plainest life a kind with no more calls than this gets every fault at each of them.
FEW_CALLS = 40


def _progress(what: str) -> Callable[[int, int], None]:
    started = time.monotonic()
    said = started

    def show(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > 5 or done == total:
            said = time.monotonic()
            print(f"{what}: {done}/{total}, {said - started:.0f} s", file=sys.stderr, flush=True)

    return show


def _lives() -> dict[str, object]:
    from fault_scenarios import Scenario, StagingAttachment, StreamingAttachment
    from lives import DocumentLife, SessionLife

    rows = Scenario(document_tokens=600, new_tokens=4, alpha=0.05)
    threads = replace(rows, io="threads")
    # Both questions fill the first segment: the fork's first, then the document's own.
    streamed = Scenario(1021, new_tokens=3, alpha=0.05, attachment=StreamingAttachment)
    staged = replace(rows, attachment=StagingAttachment, layers=3)
    lives = [
        DocumentLife(rows, "rows"),
        DocumentLife(threads, "rows, read by threads"),
        DocumentLife(staged, "read in stages"),
        DocumentLife(replace(staged, io="threads"), "read in stages, by threads"),
        DocumentLife(streamed, "streamed shadow"),
        DocumentLife(replace(streamed, io="threads"), "streamed shadow, read by threads"),
        SessionLife(rows, "session"),
        SessionLife(streamed, "session with streamed shadow"),
    ]
    return {life.name: life for life in lives}


@contextmanager
def _places(drive: Path) -> Iterator[object]:
    """Make the directories of one life on the drive, and remove them afterwards."""
    from lives import Places

    drive.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="faults-", dir=drive) as folder:
        places = Places(Path(folder) / "cold", Path(folder) / "sessions")
        places.cold_dir.mkdir()
        places.sessions.mkdir()
        yield places


def _io(drive: Path) -> dict[str, object]:
    from faulty_calls import PlainFileSystem, WithoutNativeReads
    from io_faults import run_io_faults, totals

    from hillinfer.drive.calls import DriveCalls

    lives = _lives()
    plan = [
        (lives["rows"], DriveCalls(), FEW_CALLS),
        (lives["rows, read by threads"], DriveCalls(), 4),
        (lives["rows, read by threads"], WithoutNativeReads(), 4),
        (lives["read in stages"], DriveCalls(), 4),
        (lives["read in stages, by threads"], PlainFileSystem(), 0),
        (lives["streamed shadow"], DriveCalls(), 4),
        (lives["streamed shadow, read by threads"], DriveCalls(), 0),
        (lives["rows"], PlainFileSystem(), 0),
        (lives["session"], DriveCalls(), 4),
    ]
    tallies = []
    for life, below, few in plan:
        name = f"{life.name} on {type(below).__name__}"
        with _places(drive) as places:
            tally = run_io_faults(life, places, below, few, on_run=_progress(f"faults, {name}"))
            tally.life = name
            tallies.append(tally)
    return {"totals": dict(totals(tallies)), "lives": [vars(tally) for tally in tallies]}


def _kills(drive: Path, count: int) -> dict[str, object]:
    from kills import run_kills

    lives = _lives()
    streamed = rows = staged = count // 4
    shares = {
        "session": count - streamed - rows - staged,
        "session with streamed shadow": streamed,
        "rows": rows,
        "read in stages": staged,
    }
    deaths = []
    for name, kills in shares.items():
        life = lives[name]
        model = life.scenario.model()
        with _places(drive) as places:
            progress = _progress(f"kills, {name}")
            deaths.append(run_kills(life, model, places, kills, SEED, progress))
    return {"lives": [vars(death) for death in deaths]}


def _part(name: str, drive: Path, count: int, out: Path) -> None:
    """Run one part in this process; a part forks or counts open files and wants its own."""
    sys.path[:0] = [str(HARNESS), str(HARNESS / "faults")]
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = _io(drive) if name == "io" else _kills(drive, count)
    out.write_text(json.dumps(found), encoding="utf-8")


def summary(io: dict, kills: dict) -> dict[str, object]:
    """Return the report of both parts, the sums first."""
    faults, deaths = io["totals"], kills["lives"]
    return {
        "kills": sum(one["kills"] for one in deaths),
        "io_faults": faults["io_faults"],
        "wrong_tokens": faults["wrong"] + sum(one["wrong_tokens"] for one in deaths),
        "leftovers": faults["leftovers"] + sum(one["leftovers"] for one in deaths),
        "longest_seconds": max(
            one["longest_seconds"] for part in (io, kills) for one in part["lives"]
        ),
        "unclear": faults["unclear"],
        "unreached": faults["unreached"],
        "used_again": faults["used_again"],
        "recovered": faults["recovered"],
        "failures": sum(len(one["failures"]) for one in deaths),
        "open_files": faults["open_files"],
        "faults": io,
        "deaths": kills,
    }


def main() -> None:
    """Run both parts side by side, write the report, and fail on anything that is not right."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("build/reports/faults.json"))
    arguments.add_argument(
        "--drive", type=Path, default=Path("build/faults"), help="directory on the drive to use"
    )
    arguments.add_argument("--kills", type=int, default=KILLS, help="how many processes to kill")
    arguments.add_argument("--part", choices=PARTS, help="one part only, as the other half runs")
    given = arguments.parse_args()
    if given.part:
        _part(given.part, given.drive, given.kills, given.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        outs = {name: Path(folder) / name for name in PARTS}
        command = [sys.executable, __file__, "--drive", str(given.drive)]
        command += ["--kills", str(given.kills)]
        running = [
            subprocess.Popen([*command, "--part", name, "--out", str(out)])
            for name, out in outs.items()
        ]
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit("a part of the fault harness broke: see above")
        parts = {name: json.loads(out.read_text(encoding="utf-8")) for name, out in outs.items()}
    report = summary(parts["io"], parts["kills"])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    figures = {key: value for key, value in report.items() if isinstance(value, int | float)}
    print(json.dumps(figures, indent=2))
    bad = ("wrong_tokens", "leftovers", "unclear", "unreached", "failures", "open_files")
    sys.exit(1 if any(figures[name] for name in bad) else 0)


if __name__ == "__main__":
    main()
